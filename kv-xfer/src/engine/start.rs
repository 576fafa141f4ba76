//! Starting an engine: the holder's side, then the reader's.
#![forbid(unsafe_code)]

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crossbeam::channel::{Receiver, bounded, unbounded};

use super::cards::{self, Answers, Door, Serving, SideChannelCards};
use super::clocks::Clocks;
use super::config::EngineConfig;
use super::connect::{CardSource, LocalSide};
use super::driver::{Channels, Driver};
use super::error::StartError;
use super::holder::{Holder, HolderThread};
use super::lane::{Lane, LaneWorker};
use super::probing::Prober;
use super::threads::bound;
use super::workers::{WorkerEnds, Workers, Works};
use super::{Engine, Owner};
use crate::clock::{Clock, SystemClock};
use crate::ids::{AgentName, Incarnation};
use crate::lease::{LeaseConfig, LeaseTable};
use crate::memory::KvPool;
use crate::side_channel::Listeners;
use crate::telemetry::EngineStats;
use crate::transport::{Agent, AgentRole, Transport};

impl Engine {
    /// Starts an engine over a pool and a transport: registers the pool, serves its card if
    /// [`HolderConfig::bind`](super::HolderConfig::bind) is set, and starts the driver.
    ///
    /// # Errors
    /// [`StartError`]; then nothing is left running.
    pub fn start<T: Transport>(
        config: EngineConfig,
        pool: Arc<KvPool>,
        transport: Arc<T>,
    ) -> Result<Self, StartError> {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let cards = Arc::new(SideChannelCards::new(
            &config,
            pool.layout(),
            Arc::clone(&clock),
        ));
        Self::start_with(config, pool, transport, clock, cards)
    }

    /// Like [`start`](Self::start), with a clock and a source of cards of the caller's choice.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start_with<T: Transport>(
        config: EngineConfig,
        pool: Arc<KvPool>,
        transport: Arc<T>,
        clock: Arc<dyn Clock>,
        cards: Arc<dyn CardSource>,
    ) -> Result<Self, StartError> {
        let birth = Birth::random()?;
        // Agents are opened here, and destroyed here should it fail.
        let memory = Arc::clone(pool.memory());
        let _bound = memory.bind_thread()?;
        Parts::build(config, pool, transport, clock, cards, birth, Door::Listen)?.spawn()
    }
}

/// What is drawn at random when an engine starts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Birth {
    pub incarnation: Incarnation,
    /// Where its lease words start.
    pub word_base: u64,
}

impl Birth {
    fn random() -> Result<Self, StartError> {
        Ok(Self {
            incarnation: Incarnation(random()?.max(1)),
            word_base: random()?,
        })
    }
}

/// An engine and what its threads will run.
pub(super) struct Parts<T: Transport> {
    pub engine: Engine,
    pub answers: Option<Arc<Answers>>,
    /// The serving agent.
    pub agent: T::Agent,
    pub nudged: Receiver<()>,
    pub lanes: Vec<LaneWorker<T::Agent>>,
    pub works: Works<T>,
    pub driver: Driver<T>,
}

impl<T: Transport> Parts<T> {
    pub(super) fn build(
        config: EngineConfig,
        pool: Arc<KvPool>,
        transport: Arc<T>,
        clock: Arc<dyn Clock>,
        cards: Arc<dyn CardSource>,
        birth: Birth,
        door: Door,
    ) -> Result<Self, StartError> {
        if config.reader.active == 0 || config.reader.queue == 0 {
            return Err(StartError::Config(
                "reader.active and reader.queue must be at least 1",
            ));
        }
        if config.reader.windows_in_flight == 0 {
            return Err(StartError::Config(
                "reader.windows_in_flight must be at least 1, or no read would move",
            ));
        }
        if config.tp_size != pool.layout().tp() || config.rank.tp >= config.tp_size {
            return Err(StartError::Config(
                "tp_size must be what the pool's layout is cut for, and rank.tp below it",
            ));
        }
        transport.require(config.require)?;
        // Before any agent: NIXL's backends take ports of their own, perhaps this one.
        let listeners = match (door, config.holder.bind) {
            (Door::Listen, Some(bind)) => Some(Listeners::bind(&[bind])?),
            _ => None,
        };
        let Birth {
            incarnation,
            word_base,
        } = birth;
        let stats = Arc::new(EngineStats::default());
        let (freed_tx, freed) = unbounded();
        let (nudge, nudged) = bounded(1);

        // The holder's side.
        let words = transport.control_words(config.holder.max_leases)?;
        let mut lease_config = LeaseConfig::new(config.holder.max_leases, word_base);
        lease_config.default_ttl = config.holder.default_ttl;
        lease_config.max_ttl = config.holder.max_ttl;
        let table = LeaseTable::new(lease_config).map_err(|e| StartError::Card(e.to_string()))?;
        table
            .publish_words(words.as_ref())
            .map_err(|e| StartError::Card(e.to_string()))?;
        let name = AgentName::new(format!(
            "{}/{}/{incarnation}/serve",
            config.engine_id, config.rank
        ))?;
        // Whoever serves nobody needs no thread of NIXL's to be woken again and again.
        let role = if config.holder.bind.is_some() {
            AgentRole::Serve
        } else {
            AgentRole::Read
        };
        let mut agent = transport
            .open_agent(&name, role)
            .map_err(|cause| StartError::of_agent(config.require, cause))?;
        agent.register(
            pool.regions(),
            Arc::clone(&pool) as Arc<dyn Any + Send + Sync>,
        )?;
        agent.register(&[words.region()], Arc::new(Arc::clone(&words)))?;
        let metadata = agent.metadata()?;
        let holder = Holder::new(
            table,
            Arc::clone(&words),
            Arc::clone(&clock),
            incarnation,
            freed_tx,
            nudge,
            Arc::clone(&stats),
        );
        let holder = Arc::new(holder.keyed(config.cluster_key.clone()));
        let card = cards::own_card(&config, incarnation, &pool, name, metadata, words.region());
        let (answers, serving) = match config.holder.bind {
            Some(bind) => {
                let answers = Arc::new(Answers::new(&config, &card, &holder, &clock)?);
                let serving = Serving::start(&config, bind, &answers, &clock, listeners)?;
                (Some(answers), Some(serving))
            }
            None => (None, None),
        };
        let holder_thread = HolderThread::none(Arc::clone(&holder));

        // The reader's side.
        // One more for every thread that meets peers.
        let probes = u32::try_from(config.reader.connect_threads.saturating_mul(2));
        let slots = config
            .reader
            .active
            .saturating_add(probes.unwrap_or(u32::MAX));
        let landing = transport.control_words(slots)?;
        let clocks = Arc::new(Clocks::default());
        let prober = Prober::new(config.require, config.fabric.clone(), |slots| {
            transport.control_words(slots)
        })?;
        let local = Arc::new(LocalSide {
            engine: config.engine_id.clone(),
            incarnation,
            rank: config.rank,
            pool: Arc::clone(&pool),
            landing: Arc::clone(&landing),
            prober,
            clocks: Arc::clone(&clocks),
        });
        // The count of queued reads bounds this channel; the driver empties it at every step. One
        // without a bound of its own drops what is in it when its receiver is gone, so that no read
        // is left in it without an end.
        let (reads, reads_rx) = unbounded();
        let (commands, commands_rx) = bounded(1024);
        let (wake, wake_rx) = bounded(1);
        let (events_tx, events_rx) = unbounded();
        let (errands_tx, errands_rx) = unbounded();
        let (retries_tx, retries_rx) = unbounded();
        let (wishes_tx, wishes_rx) = bounded(1024);
        let (teardowns_tx, teardowns_rx) = unbounded();
        let (returned_tx, returned) = unbounded();
        let (reports_tx, reports) = unbounded();
        let mut lanes = Vec::new();
        let mut lane_workers = Vec::new();
        for _ in 1..config.reader.lanes {
            let (lane, worker) = Lane::new(
                reports_tx.clone(),
                teardowns_tx.clone(),
                Arc::clone(&clock),
                config.reader.spin,
            );
            lanes.push(lane);
            lane_workers.push(worker);
        }
        let works = Works {
            transport: Arc::clone(&transport),
            cards,
            local,
            clock: Arc::clone(&clock),
            next_link: Arc::new(AtomicU64::new(1)),
            ends: WorkerEnds {
                errands: errands_rx,
                retries: retries_rx,
                wishes: wishes_rx,
                teardowns: teardowns_rx,
                events: events_tx,
            },
        };
        let driver = Driver::<T>::new(
            config.reader.clone(),
            config.cluster_key.clone(),
            Arc::clone(&clock),
            Arc::clone(&pool),
            landing,
            Arc::clone(&stats),
            Channels {
                reads: reads_rx,
                commands: commands_rx,
                wake: wake_rx,
                events: events_rx,
                errands: errands_tx,
                retries: retries_tx,
                wishes: wishes_tx,
                teardowns: teardowns_tx,
                returned: returned_tx.clone(),
                lanes,
                reports,
            },
        );
        let engine = Engine {
            fingerprint: pool.layout().content_fingerprint(),
            config,
            incarnation,
            pool,
            clock,
            stats,
            clocks,
            info: transport.info(),
            holder,
            holder_thread,
            serving,
            owner: Arc::new(Owner {
                wake,
                returned: returned_tx,
            }),
            next_read: AtomicU64::new(1),
            reads,
            commands,
            freed,
            returned,
            driver: None,
            workers: None,
        };
        Ok(Self {
            engine,
            answers,
            agent,
            nudged,
            lanes: lane_workers,
            works,
            driver,
        })
    }

    /// Starts the threads.
    fn spawn(self) -> Result<Engine, StartError> {
        let Self {
            mut engine,
            agent,
            nudged,
            lanes,
            works,
            driver,
            ..
        } = self;
        engine
            .holder_thread
            .start(agent, &engine.config.holder, nudged, &engine.pool)?;
        let mut helpers = Vec::with_capacity(lanes.len());
        for (n, lane) in (1..).zip(lanes) {
            let thread = std::thread::Builder::new().name(format!("kvx-lane-{n}"));
            helpers.push(thread.spawn(bound(&engine.pool, move || lane.run()))?);
        }
        engine.workers = Some(Workers::start(works, &engine.config.reader, helpers)?);
        let thread = std::thread::Builder::new().name("kvx-driver".into());
        engine.driver = Some(thread.spawn(bound(&engine.pool, move || driver.run()))?);
        tracing::info!(
            engine = %engine.config.engine_id, incarnation = %engine.incarnation,
            rank = %engine.config.rank, transport = ?engine.info,
            require = %engine.config.require, "engine started"
        );
        Ok(engine)
    }
}

/// 64 random bits.
fn random() -> Result<u64, std::io::Error> {
    let mut bytes = [0_u8; 8];
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        filled += rustix::rand::getrandom(rest, rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(u64::from_ne_bytes(bytes))
}
