//! Holder engines in processes of their own, and what is said to them.

use std::collections::HashSet;
use std::ops::Range;
use std::time::Duration;

use kv_xfer::descriptor::BlockIdsJson;
use kv_xfer::engine::{Direction, Engine, LeaseSpec};
use kv_xfer::ids::{BlockId, LeaseId, RequestId};
use kv_xfer::peer::PeerAddr;
use nixl_sys::EnvironmentOutcome;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::fixture::{self, BLOCK_TOKENS, BenchError, LIMIT, SEED};
use super::freeze;
use super::here;
use super::lease_trial::{self, LeaseCosts};
use super::proto::Shape;
use crate::cli::Exit;
use crate::proc::{Interrupt, Parent, Worker};
use crate::require;

/// The hidden subcommand that [`serve`]s.
pub const COMMAND: &str = "bench-holders";

/// What the holders of one process are asked.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case")]
pub enum ToHolders {
    /// Start `engines` engines, each over a pool of that shape, filled with the pattern.
    Start {
        /// What their names begin with; unique in this bench.
        name: String,
        /// How many.
        engines: u32,
        /// Number of the first: the n-th has the pattern of seed [`SEED`] + n.
        first: u32,
        /// Each one's pool.
        shape: Shape,
        /// Leases that each may have at once.
        max_leases: u32,
    },
    /// Lease these blocks of an engine, in that order.
    Offer {
        /// Which engine.
        engine: u32,
        /// The blocks.
        blocks: Vec<u32>,
    },
    /// Tell what the process uses.
    Usage,
    /// Tell what was leased and what has come back.
    Account,
    /// Grant, renew, revoke and expire so many leases of one block each, at the first engine.
    Leases {
        /// How many.
        count: u32,
    },
    /// Shut the engines down and end.
    Stop,
}

/// What they answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "re", rename_all = "kebab-case")]
pub enum FromHolders {
    /// Started.
    Ready {
        /// Host and port of each engine's side channel.
        addresses: Vec<(String, u16)>,
        /// What moves the bytes.
        nixl: String,
    },
    /// Leased.
    Offered {
        /// The `kv_transfer_params`.
        params: Value,
    },
    /// What the process uses.
    Usage(Usage),
    /// What became of the leases.
    Account(Account),
    /// What leases cost.
    Leases(LeaseCosts),
    /// It ends.
    Stopped,
    /// It cannot go on.
    Failed {
        /// Why.
        why: String,
    },
}

/// What a process uses.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Processor time so far, microseconds.
    pub cpu_us: u64,
    /// Resident memory, bytes.
    pub resident: u64,
    /// Open file descriptors.
    pub open_files: u64,
    /// Threads.
    pub threads: u64,
}

impl Usage {
    /// Of this process, now.
    #[must_use]
    pub fn now() -> Self {
        Self {
            cpu_us: u64::try_from(here::cpu().as_micros()).unwrap_or(u64::MAX),
            resident: here::resident(),
            open_files: here::open_files(),
            threads: here::threads(),
        }
    }

    /// Percent of one processor that was used from `earlier` to this.
    #[must_use]
    pub fn percent_since(&self, earlier: &Self, passed: Duration) -> f64 {
        let used = self.cpu_us.saturating_sub(earlier.cpu_us) as f64;
        used / passed.as_secs_f64().max(1e-6) / 1e4
    }
}

/// Leases and blocks of all engines of a process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Account {
    /// Leases granted.
    pub leases: u64,
    /// Blocks under them.
    pub blocks: u64,
    /// Leases that have ended.
    pub ended: u64,
    /// Blocks that have come back.
    pub returned: u64,
    /// Leases that ended a second time, or that nobody had been granted.
    pub wrong: u64,
}

impl Account {
    /// Whether every lease has ended, once, and all blocks are back.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.leases == self.ended && self.blocks == self.returned && self.wrong == 0
    }
}

impl std::ops::AddAssign for Account {
    fn add_assign(&mut self, other: Self) {
        self.leases += other.leases;
        self.blocks += other.blocks;
        self.ended += other.ended;
        self.returned += other.returned;
        self.wrong += other.wrong;
    }
}

/// The parent's end of a process of holders. Dropping it kills the process.
#[derive(Debug)]
pub struct Holders {
    worker: Worker,
    addresses: Vec<(String, u16)>,
    nixl: String,
}

impl Holders {
    /// Starts a process with an engine for each of these numbers, over a pool of that shape each. `name` must be unique among the live ones.
    ///
    /// # Errors
    /// [`BenchError`].
    pub fn start(
        name: &str,
        numbers: Range<u32>,
        shape: Shape,
        max_leases: u32,
        interrupt: &Interrupt,
    ) -> Result<Self, BenchError> {
        let mut worker = Worker::spawn_self(name, &["bench", COMMAND], &[], interrupt)?;
        let start = ToHolders::Start {
            name: name.to_owned(),
            engines: numbers.end.saturating_sub(numbers.start),
            first: numbers.start,
            shape,
            max_leases,
        };
        match ask(&mut worker, &start)? {
            FromHolders::Ready { addresses, nixl } => Ok(Self {
                worker,
                addresses,
                nixl,
            }),
            other => Err(unexpected(other)),
        }
    }

    /// How many engines it has.
    #[must_use]
    pub fn engines(&self) -> u32 {
        u32::try_from(self.addresses.len()).unwrap_or(u32::MAX)
    }

    /// What moves the bytes.
    #[must_use]
    pub fn nixl(&self) -> &str {
        &self.nixl
    }

    /// Where an engine's side channel listens.
    ///
    /// # Errors
    /// [`BenchError::OutOfTurn`] when there is no such engine.
    pub fn address(&self, engine: u32) -> Result<PeerAddr, BenchError> {
        self.addresses
            .get(engine as usize)
            .and_then(|(host, port)| PeerAddr::new(host, *port).ok())
            .ok_or(BenchError::OutOfTurn("there is no such holder"))
    }

    /// Has blocks leased; returns the `kv_transfer_params`.
    ///
    /// # Errors
    /// [`BenchError`].
    pub fn offer(&mut self, engine: u32, blocks: Vec<u32>) -> Result<Value, BenchError> {
        match ask(&mut self.worker, &ToHolders::Offer { engine, blocks })? {
            FromHolders::Offered { params } => Ok(params),
            other => Err(unexpected(other)),
        }
    }

    /// What the process uses now.
    ///
    /// # Errors
    /// [`BenchError`].
    pub fn usage(&mut self) -> Result<Usage, BenchError> {
        match ask(&mut self.worker, &ToHolders::Usage)? {
            FromHolders::Usage(usage) => Ok(usage),
            other => Err(unexpected(other)),
        }
    }

    /// What became of its leases.
    ///
    /// # Errors
    /// [`BenchError`].
    pub fn account(&mut self) -> Result<Account, BenchError> {
        match ask(&mut self.worker, &ToHolders::Account)? {
            FromHolders::Account(account) => Ok(account),
            other => Err(unexpected(other)),
        }
    }

    /// What so many leases cost it.
    ///
    /// # Errors
    /// [`BenchError`].
    pub fn leases(&mut self, count: u32) -> Result<LeaseCosts, BenchError> {
        match ask(&mut self.worker, &ToHolders::Leases { count })? {
            FromHolders::Leases(costs) => Ok(costs),
            other => Err(unexpected(other)),
        }
    }

    /// Has it stand still.
    ///
    /// # Errors
    /// [`BenchError::NotFrozen`].
    pub fn freeze(&self) -> Result<(), BenchError> {
        let pid = self.worker.id();
        freeze::freeze(pid).map_err(|_| BenchError::NotFrozen { pid })
    }

    /// Lets it go on.
    ///
    /// # Errors
    /// [`BenchError::NotFrozen`].
    pub fn thaw(&self) -> Result<(), BenchError> {
        let pid = self.worker.id();
        freeze::thaw(pid).map_err(|_| BenchError::NotFrozen { pid })
    }

    /// Shuts it down.
    ///
    /// # Errors
    /// [`BenchError`] when it does not end well.
    pub fn stop(mut self) -> Result<(), BenchError> {
        match ask(&mut self.worker, &ToHolders::Stop)? {
            FromHolders::Stopped => Ok(self.worker.finish(LIMIT)?),
            other => Err(unexpected(other)),
        }
    }
}

fn ask(worker: &mut Worker, request: &ToHolders) -> Result<FromHolders, BenchError> {
    worker.send(request)?;
    match worker.recv(LIMIT)? {
        FromHolders::Failed { why } => Err(BenchError::Holder(why)),
        answer => Ok(answer),
    }
}

fn unexpected(answer: FromHolders) -> BenchError {
    BenchError::Holder(format!("an answer out of turn: {answer:?}"))
}

/// The process of the holders.
#[must_use]
pub fn serve() -> Exit {
    let report = require::environment().apply_single_threaded();
    if report.outcome != EnvironmentOutcome::Applied {
        tracing::warn!("{report}");
    }
    let served = Parent::attach()
        .map_err(BenchError::from)
        .and_then(|mut parent| answer_all(&mut parent));
    match served {
        Ok(()) => Exit::Ok,
        Err(error @ BenchError::Nixl(_)) => {
            tracing::error!("{error}");
            Exit::Environment
        }
        Err(error) => {
            tracing::error!("{error}");
            Exit::CheckFailed
        }
    }
}

fn answer_all(parent: &mut Parent) -> Result<(), BenchError> {
    let mut process = Process::default();
    while let Some(request) = parent.recv()? {
        let answer = process.answer(request).inspect_err(|error| {
            // Should the pipe be gone too, the parent is not there to be told.
            let _ = parent.send(&FromHolders::Failed {
                why: error.to_string(),
            });
        })?;
        parent.send(&answer)?;
    }
    Ok(())
}

struct One {
    engine: Engine,
    live: HashSet<LeaseId>,
}

#[derive(Default)]
struct Process {
    engines: Vec<One>,
    requests: u64,
    account: Account,
}

impl Process {
    fn answer(&mut self, request: ToHolders) -> Result<FromHolders, BenchError> {
        match request {
            ToHolders::Start {
                name,
                engines,
                first,
                shape,
                max_leases,
            } => self.start(
                &name,
                first..first.saturating_add(engines),
                &shape,
                max_leases,
            ),
            ToHolders::Offer { engine, blocks } => self.offer(engine, &blocks),
            ToHolders::Usage => Ok(FromHolders::Usage(Usage::now())),
            ToHolders::Account => {
                self.collect();
                Ok(FromHolders::Account(self.account))
            }
            ToHolders::Leases { count } => {
                let one = self.engines.first().ok_or(NO_ENGINE)?;
                Ok(FromHolders::Leases(lease_trial::run(&one.engine, count)?))
            }
            ToHolders::Stop => {
                for one in self.engines.drain(..) {
                    one.engine.shutdown(Duration::from_secs(2));
                }
                Ok(FromHolders::Stopped)
            }
        }
    }

    fn start(
        &mut self,
        name: &str,
        numbers: Range<u32>,
        shape: &Shape,
        max_leases: u32,
    ) -> Result<FromHolders, BenchError> {
        let transport = require::open()?;
        let mut addresses = Vec::new();
        for n in numbers {
            let pool = fixture::pool(shape)?;
            fixture::fill(&pool, SEED.wrapping_add(n.into()), 0..shape.blocks)?;
            let engine = fixture::start(&format!("{name}-{n}"), &pool, &transport, |config| {
                config.holder.bind = Some(([127, 0, 0, 1], 0).into());
                config.holder.max_leases = max_leases;
                // It reads nothing.
                config.reader.connect_threads = 1;
                config.reader.active = 1;
            })?;
            let address = engine.side_channel().ok_or(NO_ENGINE)?;
            addresses.push((address.host(), address.port()));
            self.engines.push(One {
                engine,
                live: HashSet::new(),
            });
        }
        let info = self.engines.first().map(|one| one.engine.transport());
        Ok(FromHolders::Ready {
            addresses,
            nixl: info.map_or_else(String::new, |info| info.version.clone()),
        })
    }

    fn offer(&mut self, engine: u32, blocks: &[u32]) -> Result<FromHolders, BenchError> {
        self.requests += 1;
        let one = self.engines.get_mut(engine as usize).ok_or(NO_ENGINE)?;
        let spec = lease_spec(self.requests, blocks, Duration::from_secs(3600))?;
        let leased = one.engine.lease(spec);
        let leased = leased.map_err(|refused| BenchError::Lease(refused.to_string()))?;
        one.live.insert(leased.lease);
        self.account.leases += 1;
        self.account.blocks += blocks.len() as u64;
        let params = leased.remote.to_json_value(BlockIdsJson::Expanded);
        Ok(FromHolders::Offered { params })
    }

    fn collect(&mut self) {
        for one in &mut self.engines {
            while let Ok(freed) = one.engine.freed().try_recv() {
                self.account.returned += freed.blocks.len() as u64;
                if one.live.remove(&freed.lease) {
                    self.account.ended += 1;
                } else {
                    self.account.wrong += 1;
                }
            }
        }
    }
}

const NO_ENGINE: BenchError = BenchError::OutOfTurn("there is no such engine, or it serves nobody");

/// A lease of full blocks, with the hashes that all benches use.
pub(super) fn lease_spec(
    request: u64,
    blocks: &[u32],
    ttl: Duration,
) -> Result<LeaseSpec<'static>, BenchError> {
    Ok(LeaseSpec {
        request: RequestId::new(format!("bench-{request}"))?,
        blocks: blocks.iter().copied().map(BlockId).collect(),
        tokens: blocks.len() as u64 * u64::from(BLOCK_TOKENS),
        hashes: fixture::hashes(blocks.len()),
        ttl: Some(ttl),
        direction: Direction::DecodeToPrefill,
        tenant: None,
        conversation: None,
    })
}
