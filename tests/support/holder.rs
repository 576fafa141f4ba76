//! An engine in a process of its own that leases blocks, and the lines that are said to it.

use std::io::{BufRead, BufReader, Write};
use std::net::Ipv4Addr;
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use kv_xfer::descriptor::{BlockIdsJson, DescriptorLimits, Params, RemoteBlocks};
use kv_xfer::engine::{Direction, Engine, LeaseSpec};
use kv_xfer::ids::{BlockId, LeaseId, RequestId};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use super::content::{BLOCK_TOKENS, Shape, fill, hashes};
use super::net::{HOLDER, Net, READER};
use super::vanishing::vanishing_pool;
use super::{BODY, LIMIT, config, die_with_parent, open, this_binary_on};

/// What a holder process is to be. It travels in the environment.
const SPEC: &str = "KVX_TEST_HOLDER";
/// What a line of the protocol begins with; all others were printed by something else.
const MARK: &str = "kvx-holder ";

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HolderSpec {
    pub engine: String,
    /// 0 takes any.
    pub port: u16,
    pub shape: Shape,
    pub blocks: u32,
    /// Which machine of the test's network it is on, where there is one.
    pub machine: u8,
}

impl HolderSpec {
    pub fn new(shape: Shape, blocks: u32) -> Self {
        Self {
            engine: "decode".into(),
            port: 0,
            shape,
            blocks,
            machine: HOLDER,
        }
    }

    pub fn on(mut self, machine: u8) -> Self {
        self.machine = machine;
        self
    }

    pub fn named(mut self, engine: &str) -> Self {
        self.engine = engine.into();
        self
    }
}

#[derive(Debug, Serialize, Deserialize)]
enum Ask {
    /// Fill blocks and lease them.
    Lease {
        request: String,
        blocks: Vec<u32>,
        tokens: u64,
        generation: u16,
    },
    /// End a lease after a while, and overwrite its blocks at once.
    Revoke {
        lease: u64,
        after_us: u64,
        generation: u16,
    },
    /// Unmap the pool's memory, as an owner that breaks its word might.
    Unmap,
    /// What has come back so far.
    Freed,
    /// Leases that hold, and notices that came.
    Counts,
    /// End in an orderly way.
    Leave,
}

#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Ready { port: u16 },
    Lent { lease: u64, params: String },
    Revoked { held: bool },
    Freed(Vec<Freed>),
    Counts { leases: u64, notices: u64 },
}

/// Blocks that came back to a holder.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Freed {
    pub lease: u64,
    pub reason: String,
    pub blocks: Vec<u32>,
}

/// Blocks that a holder has leased.
#[derive(Debug, Clone)]
pub struct Lent {
    pub lease: LeaseId,
    pub remote: RemoteBlocks,
}

/// A holder's process. It is killed when this is dropped.
pub struct Holder {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    pub port: u16,
}

impl Holder {
    /// Starts a holder. The caller's thread must outlive it.
    pub fn start(spec: &HolderSpec) -> Self {
        let net = Net::current();
        let place = net.as_ref().map(|net| (net, spec.machine));
        let mut child = this_binary_on(place, "holder_process")
            .arg("--ignored")
            .env(SPEC, serde_json::to_string(spec).unwrap())
            .env_remove(BODY)
            // What is loaded into the reader is for the reader.
            .env_remove("LD_PRELOAD")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in output.lines() {
                let Ok(line) = line else { return };
                match line.strip_prefix(MARK) {
                    Some(line) => {
                        if sender.send(line.to_owned()).is_err() {
                            return;
                        }
                    }
                    None => eprintln!("{line}"),
                }
            }
        });
        let mut holder = Self {
            input: child.stdin.take(),
            child,
            lines,
            port: 0,
        };
        let Answer::Ready { port } = holder.hear() else {
            panic!("the holder is not ready");
        };
        holder.port = port;
        holder
    }

    fn say(&mut self, ask: &Ask) {
        let mut line = serde_json::to_string(ask).unwrap();
        line.push('\n');
        let input = self.input.as_mut().unwrap();
        input.write_all(line.as_bytes()).unwrap();
        input.flush().unwrap();
    }

    fn hear(&mut self) -> Answer {
        match self.lines.recv_timeout(LIMIT) {
            Ok(line) => serde_json::from_str(&line).unwrap(),
            Err(RecvTimeoutError::Timeout) => panic!("the holder does not answer"),
            Err(RecvTimeoutError::Disconnected) => {
                panic!("the holder has ended: {:?}", self.child.wait())
            }
        }
    }

    /// Fills whole blocks with a generation of content and leases them.
    pub fn lend(&mut self, request: &str, blocks: &[BlockId], generation: u16) -> Lent {
        let tokens = blocks.len() as u64 * u64::from(BLOCK_TOKENS);
        self.lend_tokens(request, blocks, tokens, generation)
    }

    /// Like [`lend`](Self::lend), with a last block that `tokens` may leave partly filled.
    pub fn lend_tokens(
        &mut self,
        request: &str,
        blocks: &[BlockId],
        tokens: u64,
        generation: u16,
    ) -> Lent {
        self.say(&Ask::Lease {
            request: request.into(),
            blocks: blocks.iter().map(|block| block.0).collect(),
            tokens,
            generation,
        });
        let Answer::Lent { lease, params } = self.hear() else {
            panic!("the holder does not lease");
        };
        match Params::from_json_str(&params, &DescriptorLimits::default()).unwrap() {
            Params::Remote(remote) => Lent {
                lease: LeaseId(lease),
                remote: *remote,
            },
            Params::Miss(miss) => panic!("nothing is offered: {miss:?}"),
        }
    }

    /// Has a lease end after a while and its blocks overwritten at once; does not wait for it.
    pub fn begin_revoke(&mut self, lease: LeaseId, after: Duration, generation: u16) {
        self.say(&Ask::Revoke {
            lease: lease.0,
            after_us: after.as_micros() as u64,
            generation,
        });
    }

    /// Waits until what [`begin_revoke`](Self::begin_revoke) asked for is done; whether the lease
    /// still held.
    pub fn end_revoke(&mut self) -> bool {
        let Answer::Revoked { held } = self.hear() else {
            panic!("the holder does not revoke");
        };
        held
    }

    /// Has it unmap its memory. It may die of that before it has answered.
    pub fn unmap(&mut self) {
        self.say(&Ask::Unmap);
        let _ = self.lines.recv_timeout(LIMIT);
    }

    /// What has come back since the last time it was asked.
    pub fn freed(&mut self) -> Vec<Freed> {
        self.say(&Ask::Freed);
        let Answer::Freed(freed) = self.hear() else {
            panic!("the holder does not say what came back");
        };
        freed
    }

    /// Whether it is there and answers.
    pub fn answers(&mut self) -> bool {
        let Some(input) = &mut self.input else {
            return false;
        };
        let asked = serde_json::to_string(&Ask::Counts).unwrap();
        // A process that has ended has closed its pipes.
        writeln!(input, "{asked}").is_ok()
            && match self.lines.recv_timeout(LIMIT) {
                Ok(_) => true,
                Err(RecvTimeoutError::Disconnected) => false,
                Err(RecvTimeoutError::Timeout) => panic!("the holder does not answer"),
            }
    }

    /// How it ended by itself.
    pub fn ended(&mut self) -> String {
        self.child.wait().unwrap().to_string()
    }

    /// Leases that hold, and notices that came.
    pub fn counts(&mut self) -> (u64, u64) {
        self.say(&Ask::Counts);
        let Answer::Counts { leases, notices } = self.hear() else {
            panic!("the holder does not count");
        };
        (leases, notices)
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32).unwrap()
    }

    /// Sends SIGKILL and does not wait.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
    }

    /// SIGKILL, and waits until the process is gone.
    pub fn kill_and_wait(&mut self) {
        self.kill();
        self.child.wait().unwrap();
    }

    /// Holds every thread of the process still; when this returns, none runs on.
    pub fn freeze(&self) {
        kill_process(self.pid(), Signal::STOP).unwrap();
        let tasks = format!("/proc/{}/task", self.child.id());
        super::eventually("every thread has stopped", || {
            let mut tasks = std::fs::read_dir(&tasks).unwrap().flatten();
            tasks.all(|task| {
                // The state follows the name, which may hold anything but ends at the last bracket.
                std::fs::read_to_string(task.path().join("stat"))
                    .ok()
                    .and_then(|stat| {
                        stat.rsplit_once(") ")
                            .map(|(_, rest)| rest.starts_with('T'))
                    })
                    .unwrap_or(true)
            })
        });
    }

    pub fn thaw(&self) {
        kill_process(self.pid(), Signal::CONT).unwrap();
    }

    /// Ends in an orderly way; fails unless that ends well.
    pub fn leave(mut self) {
        self.say(&Ask::Leave);
        self.input = None;
        super::eventually("the holder leaves", || {
            self.child.try_wait().unwrap().is_some()
        });
        let status = self.child.wait().unwrap();
        assert!(status.success(), "the holder left with {status}");
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // Fails for one that has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The body of a holder's process; nothing when this is none.
pub fn serve_holder() {
    let Ok(spec) = std::env::var(SPEC) else {
        return;
    };
    die_with_parent();
    let spec: HolderSpec = serde_json::from_str(&spec).unwrap();
    let mut config = config(&spec.engine);
    let host = match Net::current() {
        Some(_) => Net::address(spec.machine),
        None => Ipv4Addr::LOCALHOST,
    };
    config.holder.bind = Some((host, spec.port).into());
    let (pool, memory) = vanishing_pool(spec.shape, spec.blocks);
    let engine = Engine::start(config, pool, open()).unwrap();
    answer(&Answer::Ready {
        port: engine.side_channel().unwrap().port(),
    });
    for line in std::io::stdin().lines() {
        let ask = serde_json::from_str(&line.unwrap()).unwrap();
        if matches!(ask, Ask::Leave) {
            break;
        }
        if matches!(ask, Ask::Unmap) {
            memory.unmap();
        }
        answer(&obey(&engine, ask));
    }
    drop(engine);
}

/// What a victim process reads. It travels in the environment.
const VICTIM: &str = "KVX_TEST_VICTIM";

/// A process that reads the same blocks without an end. It is killed when this is dropped.
pub struct ReadingProcess(Child);

impl ReadingProcess {
    /// Starts one, which keeps the lease.
    pub fn start(shape: Shape, lent: &Lent) -> Self {
        let params = lent.remote.to_json_string(BlockIdsJson::Omitted);
        let spec = serde_json::to_string(&(shape, params)).unwrap();
        let net = Net::current();
        let child = this_binary_on(net.as_ref().map(|net| (net, READER)), "reader_process")
            .arg("--ignored")
            .env(VICTIM, spec)
            .env_remove(BODY)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn();
        let mut this = Self(child.unwrap());
        let output = BufReader::new(this.0.stdout.take().unwrap());
        let mut lines = output.lines().map_while(Result::ok);
        // Blocks until the process says so or ends; this process is killed if that takes too long.
        assert!(lines.any(|line| line.starts_with(MARK)), "it does not read");
        this
    }

    pub fn kill_and_wait(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for ReadingProcess {
    fn drop(&mut self) {
        // Fails for one that has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The body of a reading process; nothing when this is none.
pub fn read_without_end() {
    let Ok(spec) = std::env::var(VICTIM) else {
        return;
    };
    die_with_parent();
    let (shape, params): (Shape, String) = serde_json::from_str(&spec).unwrap();
    let params = Params::from_json_str(&params, &DescriptorLimits::default()).unwrap();
    let Params::Remote(remote) = params else {
        panic!("nothing is offered");
    };
    let blocks = remote.block_count() as u32;
    let reader = super::reader(shape, blocks, |_| {});
    let offer = reader.accept(&remote, None, None).unwrap();
    let read = || {
        let blocks = super::claim(&reader, 0..blocks);
        super::landed(super::read(&reader, super::keeping(&offer, blocks)));
    };
    read();
    println!("\n{MARK}");
    loop {
        read();
    }
}

fn answer(answer: &Answer) {
    let text = serde_json::to_string(answer).unwrap();
    let mut out = std::io::stdout().lock();
    // The test runner may have begun a line.
    writeln!(out, "\n{MARK}{text}").unwrap();
    out.flush().unwrap();
}

fn obey(engine: &Engine, ask: Ask) -> Answer {
    match ask {
        Ask::Lease {
            request,
            blocks,
            tokens,
            generation,
        } => {
            let blocks: Vec<BlockId> = blocks.into_iter().map(BlockId).collect();
            fill(engine.pool(), &blocks, generation);
            let leased = engine
                .lease(LeaseSpec {
                    request: RequestId::new(request).unwrap(),
                    blocks,
                    tokens,
                    hashes: hashes((tokens / u64::from(BLOCK_TOKENS)) as usize),
                    ttl: None,
                    direction: Direction::DecodeToPrefill,
                    tenant: None,
                    conversation: None,
                })
                .unwrap();
            Answer::Lent {
                lease: leased.lease.0,
                params: leased.remote.to_json_string(BlockIdsJson::Omitted),
            }
        }
        Ask::Revoke {
            lease,
            after_us,
            generation,
        } => {
            std::thread::sleep(Duration::from_micros(after_us));
            let lease = LeaseId(lease);
            let held = engine.revoke(lease);
            // Other leases may have ended before it.
            let mut freed = std::iter::from_fn(|| engine.freed().recv_timeout(LIMIT).ok());
            if held {
                let freed = freed.find(|freed| freed.lease == lease).unwrap();
                fill(engine.pool(), &freed.blocks, generation);
            }
            Answer::Revoked { held }
        }
        Ask::Unmap => Answer::Counts {
            leases: 0,
            notices: 0,
        },
        Ask::Freed => {
            let freed = engine.freed().try_iter().map(|freed| Freed {
                lease: freed.lease.0,
                reason: freed.reason.as_str().into(),
                blocks: freed.blocks.iter().map(|block| block.0).collect(),
            });
            Answer::Freed(freed.collect())
        }
        Ask::Counts => {
            let stats = engine.stats();
            Answer::Counts {
                leases: stats.leases,
                notices: stats.notices,
            }
        }
        Ask::Leave => unreachable!("ends the loop"),
    }
}
