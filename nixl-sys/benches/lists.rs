//! What a request costs before it is posted: from lists that are filled for it (direct), or from indices into lists of
//! all blocks that were prepared before (prepared); and what preparing those costs once.
//!
//! Nothing is posted. Two agents over UCX in this process stand for the two sides.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

#[path = "../tests/common/mod.rs"]
mod common;

use std::cell::RefCell;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::peer::{Peer, serving};
use common::real_runtime;
use criterion::{Criterion, Throughput};
use nixl_sys::*;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

/// Bytes of a block, as of one layer with few heads.
const BLOCK: usize = 8 << 10;
/// Blocks of memory on each side.
const POOL: usize = 131_072;
/// Registered regions on each side, as many as a model has layers.
const REGIONS: usize = 32;
/// Descriptors of a request.
const WINDOWS: [usize; 3] = [64, 1_024, 16_384];
/// Blocks of prepared lists.
const PREPARED: [usize; 3] = [16_384, 131_072, 1_048_576];
/// How often lists are prepared; the first is told apart.
const PREPARATIONS: usize = 7;
/// Time that one row of the table is given.
const FOR: Duration = Duration::from_secs(1);

/// Whether everything runs once and nothing is measured, as criterion decides it.
fn is_test() -> bool {
    let given = |wanted| std::env::args().any(|argument| argument == wanted);
    given("--test") || !given("--bench")
}

/// Lists of all blocks.
#[derive(Clone, Copy)]
struct Prepared {
    local: PreparedDlistHandle,
    remote: PreparedDlistHandle,
}

/// How long each step took.
type Steps<const N: usize> = [Duration; N];

/// The blocks of a request, pair by pair.
type Window<'a> = (&'a [i32], &'a [i32]);

struct Pair {
    library: Arc<Library>,
    reader: Peer,
    holder: Peer,
    options: OptArgsHandle,
    local: XferDlistHandle,
    remote: XferDlistHandle,
    /// Blocks of memory on each side.
    pool: usize,
}

impl Pair {
    fn new(library: &Arc<Library>, pool: usize) -> Self {
        let len = pool * BLOCK;
        let peer = |name, config: &AgentConfig| {
            Peer::in_regions(library, name, config, vec![0; len], len.div_ceil(REGIONS))
        };
        let holder = peer("holder", &serving());
        let reader = peer("reader", &AgentConfig::default());
        // SAFETY: one thread uses the handles, which are new; the bytes are what the holder's agent gave.
        unsafe {
            library
                .load_remote_md(reader.agent, &holder.metadata())
                .unwrap();
            let options = library.create_opt_args().unwrap();
            library
                .opt_args_add_backend(options, reader.backend)
                .unwrap();
            Self {
                options,
                local: library.create_xfer_dlist(MemoryType::Dram).unwrap(),
                remote: library.create_xfer_dlist(MemoryType::Dram).unwrap(),
                library: library.clone(),
                reader,
                holder,
                pool,
            }
        }
    }

    /// Clears lists and fills them, makes a request of them, and lets it go.
    fn direct(&self, window: Window<'_>) -> Steps<3> {
        let library = &self.library;
        let local_base = self.reader.memory.as_ptr().addr();
        let remote_base = self.holder.memory.as_ptr().addr();
        let start = Instant::now();
        // SAFETY: all handles are live and this thread's; NIXL copied the lists into earlier requests.
        unsafe {
            library.xfer_dlist_clear(self.local).unwrap();
            library.xfer_dlist_clear(self.remote).unwrap();
            for (local, remote) in window.0.iter().zip(window.1) {
                let (local, remote) = (*local as usize * BLOCK, *remote as usize * BLOCK);
                library
                    .xfer_dlist_add_desc(self.local, local_base + local, BLOCK, 0)
                    .unwrap();
                library
                    .xfer_dlist_add_desc(self.remote, remote_base + remote, BLOCK, 0)
                    .unwrap();
            }
        }
        let filled = Instant::now();
        // SAFETY: all handles are live and this thread's; the request is never posted.
        let request = unsafe {
            library.create_xfer_req(
                self.reader.agent,
                XferOp::Read,
                self.local,
                self.remote,
                c"holder",
                Some(self.options),
            )
        };
        let made = Instant::now();
        self.release(request.unwrap());
        [filled - start, made - filled, made.elapsed()]
    }

    /// Makes a request of prepared lists, and lets it go.
    fn prepared(&self, lists: Prepared, window: Window<'_>) -> Steps<2> {
        let start = Instant::now();
        // SAFETY: all handles are live and this thread's; the request is never posted.
        let request = unsafe {
            self.library.make_xfer_req(
                self.reader.agent,
                XferOp::Read,
                lists.local,
                window.0,
                lists.remote,
                window.1,
                Some(self.options),
            )
        };
        let made = Instant::now();
        self.release(request.unwrap());
        [made - start, made.elapsed()]
    }

    fn release(&self, request: XferReqHandle) {
        // SAFETY: the request is live, was never posted, and is not used again.
        unsafe {
            self.library
                .release_xfer_req(self.reader.agent, request)
                .unwrap();
            self.library.destroy_xfer_req(request).unwrap();
        }
    }

    /// Prepares lists of `blocks` on both sides: for each, how long it took to fill the list and to prepare it.
    ///
    /// More blocks than there is memory for begin again at its start, which NIXL does not care about.
    fn prepare(&self, blocks: usize) -> (Prepared, Steps<4>) {
        let side = |base: usize, agent| {
            let start = Instant::now();
            // SAFETY: the handles are live and this thread's; the list is not used after it is destroyed.
            unsafe {
                let list = self.library.create_xfer_dlist(MemoryType::Dram).unwrap();
                for block in 0..blocks {
                    let address = base + block % self.pool * BLOCK;
                    self.library
                        .xfer_dlist_add_desc(list, address, BLOCK, 0)
                        .unwrap();
                }
                let filled = Instant::now();
                let prepared = self
                    .library
                    .prep_xfer_dlist(self.reader.agent, agent, list, Some(self.options))
                    .unwrap();
                self.library.destroy_xfer_dlist(list).unwrap();
                (prepared, filled - start, filled.elapsed())
            }
        };
        let (local, local_fill, local_prepare) = side(self.reader.memory.as_ptr().addr(), c"");
        let (remote, remote_fill, remote_prepare) =
            side(self.holder.memory.as_ptr().addr(), c"holder");
        let steps = [local_fill, local_prepare, remote_fill, remote_prepare];
        (Prepared { local, remote }, steps)
    }

    fn unprepare(&self, lists: Prepared) {
        for list in [lists.local, lists.remote] {
            // SAFETY: the list is live, its requests are gone, and it is not used again.
            unsafe {
                self.library
                    .release_xfer_dlist_handle(self.reader.agent, list)
                    .unwrap();
            }
        }
    }

    fn destroy(self) {
        // SAFETY: the handles are live and not used again.
        unsafe {
            self.library.destroy_xfer_dlist(self.local).unwrap();
            self.library.destroy_xfer_dlist(self.remote).unwrap();
            self.library.destroy_opt_args(self.options).unwrap();
            self.library
                .invalidate_remote_md(self.reader.agent, c"holder")
                .unwrap();
        }
        self.reader.destroy();
        self.holder.destroy();
    }
}

/// All blocks of both sides, from which one window after the other is taken.
struct Order {
    local: Vec<i32>,
    remote: Vec<i32>,
}

impl Order {
    fn contiguous(pool: usize) -> Self {
        let blocks: Vec<i32> = (0..pool)
            .map(|block| i32::try_from(block).unwrap())
            .collect();
        Self {
            local: blocks.clone(),
            remote: blocks,
        }
    }

    fn random(pool: usize) -> Self {
        let mut order = Self::contiguous(pool);
        order.local.shuffle(&mut ChaCha8Rng::seed_from_u64(1));
        order.remote.shuffle(&mut ChaCha8Rng::seed_from_u64(2));
        order
    }

    /// Windows of `len` blocks, without end.
    fn windows(&self, len: usize) -> impl Iterator<Item = Window<'_>> {
        self.local
            .chunks_exact(len)
            .zip(self.remote.chunks_exact(len))
            .cycle()
    }
}

/// The median of each step and of their sum, the latter last.
fn medians<const N: usize>(runs: &[Steps<N>]) -> Vec<Duration> {
    let median = |of: &dyn Fn(&Steps<N>) -> Duration| {
        let mut times: Vec<Duration> = runs.iter().map(of).collect();
        times.sort();
        times[times.len() / 2]
    };
    (0..N)
        .map(|step| median(&|steps| steps[step]))
        .chain([median(&|steps| steps.iter().sum())])
        .collect()
}

/// The medians of many runs, or of one where nothing is measured.
fn measure<const N: usize>(mut run: impl FnMut() -> Steps<N>) -> Vec<Duration> {
    let end = Instant::now() + FOR;
    let mut runs = vec![run()];
    while !is_test() && Instant::now() < end {
        runs.push(run());
    }
    medians(&runs)
}

fn requests(criterion: &mut Criterion, pair: &Pair) {
    let (lists, _) = pair.prepare(pair.pool);
    let mut rows = Vec::new();
    for (name, order) in [
        ("random", Order::random(pair.pool)),
        ("contiguous", Order::contiguous(pair.pool)),
    ] {
        for len in WINDOWS {
            let windows = RefCell::new(order.windows(len));
            let next = || windows.borrow_mut().next().unwrap();
            let mut group = criterion.benchmark_group(format!("lists/{name}/{len}"));
            group.throughput(Throughput::Elements(len as u64));
            group.bench_function("direct", |b| b.iter(|| pair.direct(black_box(next()))));
            group.bench_function("prepared", |b| {
                b.iter(|| pair.prepared(lists, black_box(next())));
            });
            group.finish();
            let direct = measure(|| pair.direct(next()));
            let prepared = measure(|| pair.prepared(lists, next()));
            rows.push((name, len, direct, prepared));
        }
    }
    pair.unprepare(lists);
    if is_test() {
        return;
    }
    println!(
        "\nns/descriptor of a request, not posted ({} blocks a side)",
        pair.pool
    );
    println!(
        "{:<12}{:>8} |{:>8}{:>8}{:>9}{:>9} |{:>8}{:>9}{:>10} |{:>7}",
        "order",
        "window",
        "fill",
        "create",
        "release",
        "direct",
        "make",
        "release",
        "prepared",
        "ratio"
    );
    for (name, len, direct, prepared) in rows {
        let each = |time: Duration| time.as_secs_f64() * 1e9 / len as f64;
        print!("{name:<12}{len:>8} |");
        print!("{:>8.1}{:>8.1}", each(direct[0]), each(direct[1]));
        print!("{:>9.1}{:>9.1} |", each(direct[2]), each(direct[3]));
        print!("{:>8.1}{:>9.1}", each(prepared[0]), each(prepared[1]));
        let ratio = direct[3].as_secs_f64() / prepared[2].as_secs_f64();
        println!("{:>10.1} |{ratio:>7.2}", each(prepared[2]));
    }
}

fn preparations(pair: &Pair) {
    if is_test() {
        pair.unprepare(pair.prepare(PREPARED[0]).0);
        return;
    }
    println!("\nms to fill and prepare lists of all blocks, once");
    println!(
        "{:>9} |{:>11}{:>9} |{:>12}{:>9} |{:>8}{:>8} |{:>10}",
        "blocks", "local fill", "prepare", "remote fill", "prepare", "both", "first", "ns/block"
    );
    for blocks in PREPARED {
        let runs: Vec<_> = (0..PREPARATIONS)
            .map(|_| {
                let (lists, steps) = pair.prepare(blocks);
                pair.unprepare(lists);
                steps
            })
            .collect();
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let first = ms(runs[0].iter().sum());
        let all = medians(&runs);
        print!("{blocks:>9} |{:>11.2}{:>9.2} |", ms(all[0]), ms(all[1]));
        print!("{:>12.2}{:>9.2} |", ms(all[2]), ms(all[3]));
        let each = all[4].as_secs_f64() * 1e9 / blocks as f64;
        println!("{:>8.2}{first:>8.2} |{each:>10.1}", ms(all[4]));
    }
}

fn main() {
    let _ = Environment::recommended().apply_single_threaded();
    // Says itself why it is skipped.
    let Some(place) = real_runtime() else { return };
    let path = match find_in(&place) {
        Ok(path) => path,
        Err(error) => {
            println!("skipped: {error}");
            return;
        }
    };
    let library = Library::open(&path).unwrap();
    let pair = Pair::new(&library, if is_test() { WINDOWS[2] } else { POOL });
    let mut criterion = Criterion::default()
        .warm_up_time(FOR / 2)
        .measurement_time(2 * FOR)
        .sample_size(30)
        .configure_from_args();
    requests(&mut criterion, &pair);
    preparations(&pair);
    pair.destroy();
    criterion.final_summary();
}
