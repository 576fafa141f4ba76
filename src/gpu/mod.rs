//! `kvx gpu-check`: reads between the pools of two processes, on a GPU or in host memory: every byte, leases that are revoked
//! during the read, the order with work on streams, and rates beside plain copies in the same run.

mod checks;
mod holder;
mod proto;
mod reader;
pub mod report;
mod side;

use std::path::PathBuf;
use std::time::{Duration, Instant};
use std::{fs, io};

use clap::Args;
use kv_xfer::memory::cuda::CudaDevice;
use nixl_sys::EnvironmentOutcome;

use self::reader::{Pair, copy_rates};
use self::report::GpuReport;
use self::side::CheckError;
use crate::bench::proto::Shape;
use crate::cli::Exit;
use crate::memory::{MemoryChoice, PoolMemory};
use crate::proc::{Interrupt, Parent, ProcError, Worker};
use crate::require;
use crate::require::FabricArgs;

/// Help of `kvx gpu-check`.
pub const GPU_CHECK_HELP: &str = "\
Examples:
  kvx gpu-check --memory cuda:0       GPU to GPU, GPU to host and host to GPU, within one GPU
  kvx gpu-check --memory host         the same steps in host memory: says nothing about GPUs
  compute-sanitizer kvx gpu-check --quick --memory cuda:0";

/// Arguments of `kvx gpu-check`.
#[derive(Debug, Clone, Args)]
pub struct GpuCheckArgs {
    /// Where the blocks are: host, cuda:N, or auto: on the first GPU if there is one
    #[arg(long, value_name = "MEMORY", default_value_t)]
    pub memory: MemoryChoice,

    /// Print one JSON object to stdout, and nothing else
    #[arg(long)]
    pub json: bool,

    /// Write the same object to this file
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,

    /// Few and small reads
    #[arg(long)]
    pub quick: bool,

    /// MiB of each pool
    #[arg(long, value_name = "MIB", default_value_t = 256,
          value_parser = clap::value_parser!(u64).range(8..=65_536))]
    pub mib: u64,

    /// What carries the bytes.
    #[command(flatten)]
    pub fabric: FabricArgs,

    /// Give up after so many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 400,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub timeout: u64,
}

/// Regions and bytes of a block of a region: layer by layer as allocators cut them, and all layers of a block side by side.
const SHAPES: [(u32, u64); 5] = [
    (64, 8 << 10),
    (64, 32 << 10),
    (64, 128 << 10),
    (1, 512 << 10),
    (1, 2 << 20),
];
/// Time for the holder to end.
const END_LIMIT: Duration = Duration::from_secs(20);

/// `kvx gpu-check`.
#[must_use]
pub fn run(args: &GpuCheckArgs) -> Exit {
    // Both for this process, which reads, and for the other.
    if let Err(unmet) = require::announce(require::opening(&args.fabric), &args.fabric) {
        eprintln!("{unmet}");
        return Exit::CheckFailed;
    }
    if let Err(error) = require::ready() {
        eprintln!("{error}");
        return Exit::Environment;
    }
    let memory = match args.memory.resolve() {
        Ok(memory) => memory,
        Err(error) => {
            eprintln!("{error}");
            return Exit::Environment;
        }
    };
    let interrupt = match Interrupt::install() {
        Ok(interrupt) => interrupt,
        Err(error) => {
            eprintln!("Ctrl-C cannot be handled: {error}");
            return Exit::Environment;
        }
    };
    let report = match play(args, memory, &interrupt) {
        Ok(report) => report,
        Err(CheckError::Proc(ProcError::Interrupted)) => {
            eprintln!("interrupted");
            return Exit::Interrupted;
        }
        Err(error) => {
            eprintln!("{error}");
            return match error {
                CheckError::Nixl(_) | CheckError::Cuda(_) => Exit::Environment,
                _ => Exit::CheckFailed,
            };
        }
    };
    if let Err(error) = publish(args, &report) {
        eprintln!("the report cannot be written: {error}");
        return Exit::CheckFailed;
    }
    if report.ok {
        Exit::Ok
    } else {
        Exit::CheckFailed
    }
}

fn publish(args: &GpuCheckArgs, report: &GpuReport) -> io::Result<()> {
    let json = serde_json::to_string_pretty(report)?;
    if let Some(path) = &args.out {
        fs::write(path, format!("{json}\n"))?;
    }
    if args.json {
        println!("{json}");
    } else {
        print!("{}", report.to_text());
    }
    Ok(())
}

/// The holder's process.
#[must_use]
pub fn run_holder() -> Exit {
    let report = require::environment().apply_single_threaded();
    if report.outcome != EnvironmentOutcome::Applied {
        tracing::warn!("{report}");
    }
    let served = Parent::attach()
        .map_err(CheckError::from)
        .and_then(|mut parent| holder::serve(&mut parent));
    match served {
        Ok(()) => Exit::Ok,
        Err(error) => {
            tracing::error!("{error}");
            Exit::CheckFailed
        }
    }
}

/// Pools of so many bytes.
fn shape(regions: u32, block_bytes: u64, bytes: u64) -> Shape {
    let blocks = bytes / block_bytes.saturating_mul(regions.into()).max(1);
    Shape {
        regions,
        block_bytes,
        blocks: u32::try_from(blocks).unwrap_or(u32::MAX).max(4),
    }
}

fn play(
    args: &GpuCheckArgs,
    memory: PoolMemory,
    interrupt: &Interrupt,
) -> Result<GpuReport, CheckError> {
    let end = Instant::now() + Duration::from_secs(args.timeout);
    let in_time = || match (interrupt.is_raised(), Instant::now() < end) {
        (true, _) => Err(CheckError::Proc(ProcError::Interrupted)),
        (false, true) => Ok(()),
        (false, false) => Err(CheckError::Late),
    };
    let mut report = GpuReport {
        memory: memory.to_string(),
        gpu: match memory {
            PoolMemory::Host => None,
            PoolMemory::Cuda(ordinal) => {
                let device = CudaDevice::open(ordinal)?;
                let (major, minor) = CudaDevice::driver_version()?;
                let info = device.info();
                let (name, bus, gib) = (&info.name, &info.bus_id, info.bytes >> 30);
                Some(format!("{name}, {gib} GiB, at {bus}; CUDA {major}.{minor}"))
            }
        },
        ..GpuReport::default()
    };
    let mut worker = Worker::spawn_self("holder", &["gpu-check-holder"], &[], interrupt)?;
    let bytes = if args.quick { 16 << 20 } else { args.mib << 20 };
    let (times, revocations) = if args.quick { (2, 6) } else { (9, 30) };
    let host = PoolMemory::Host;
    let ways = if memory.is_host() {
        vec![(host, host)]
    } else {
        vec![(memory, memory), (memory, host), (host, memory)]
    };
    for (there, here) in &ways {
        let way = format!("{there} -> {here}");
        let mut pair = Pair::set_up(&mut worker, shape(64, 8 << 10, bytes), *there, *here)?;
        report.nixl.clone_from(&pair.side.nixl);
        let steps = [
            checks::every_byte(&mut pair, &way)?,
            checks::revoked(&mut pair, &way, revocations)?,
            checks::order(&mut pair, &way)?,
        ];
        for (check, carrier) in steps {
            report.checks.push(check);
            report
                .carried_by
                .extend(carrier.map(|carrier| format!("{way}: {carrier}")));
        }
        in_time()?;
    }
    for (there, here) in ways {
        let way = format!("{there} -> {here}");
        for (regions, block_bytes) in SHAPES {
            if args.quick && regions > 1 && block_bytes > 8 << 10 {
                continue;
            }
            in_time()?;
            let shape = shape(regions, block_bytes, bytes);
            let mut pair = Pair::set_up(&mut worker, shape, there, here)?;
            let of_a_read = u64::from(shape.blocks.saturating_sub(1))
                .saturating_mul(block_bytes)
                .saturating_mul(regions.into());
            let copies = copy_rates(here, of_a_read, times)?;
            report
                .rates
                .push(checks::rate(&mut pair, &way, &copies, times)?);
        }
    }
    worker.finish(END_LIMIT)?;
    report.ok = report.checks.iter().all(|check| check.ok);
    Ok(report)
}
