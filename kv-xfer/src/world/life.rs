//! Places, and the lives of engines at them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::agent::{LifeAgent, LifeTransport};
use super::content;
use super::net::LifeCards;
use super::record::Accepted;
use super::{Rule, World};
use crate::clock::{ManualClock, MonoTime};
use crate::engine::{Birth, CardSource, EngineConfig, Errands, Event, Stepped};
use crate::ids::{EngineId, Incarnation};
use crate::memory::KvPool;
use crate::peer::PeerAddr;

/// Meetings that a life does at once, of either kind.
pub(super) const MEETINGS: usize = 2;
/// How long a destination may stay in doubt.
const ABANDON: Duration = Duration::from_millis(400);
pub(super) const CONNECT: Duration = Duration::from_millis(500);
/// The longest lease.
const MAX_TTL: Duration = Duration::from_secs(20);

/// Where engines live, one after the other, under one name and address.
#[derive(Debug)]
pub(super) struct Place {
    pub name: EngineId,
    pub addr: PeerAddr,
    pub bind: SocketAddr,
    pub clock: Arc<ManualClock>,
    /// The life that is there.
    pub life: Option<usize>,
    pub block_first: bool,
    pub blocks: u32,
    pub word_base: u64,
}

/// Who may do what with a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    Free,
    /// So many leases hold it.
    Leases(u32),
    /// The destination of a read.
    Read(usize),
    /// The engine computes with it.
    Model,
}

/// What was done off the driver's thread, and when the driver hears of it.
pub(super) struct Pending {
    pub event: Event<LifeAgent>,
    /// In the world's time.
    pub at: u64,
    /// The meeting threads that are busy with it.
    pub thread: Option<Errands>,
}

/// One life of an engine.
pub(super) struct Life {
    pub no: usize,
    pub place: usize,
    pub stepped: Stepped<LifeTransport>,
    pub owners: Vec<Owner>,
    pub tags: Vec<u64>,
    pub generations: Vec<u32>,
    pub accepted: Vec<Accepted>,
    pub pending: Vec<Pending>,
    /// Reads whose end or whose blocks are awaited.
    pub open: Vec<usize>,
    /// When something ends although nothing comes in.
    pub wake: MonoTime,
    /// When its next lease ends.
    pub lease_end: Option<MonoTime>,
    /// Told to shut down.
    pub stopping: bool,
    /// By when, on its clock.
    pub stop_by: MonoTime,
    /// Blocks may stay in quarantine for ever: the driver was lost or ran out of time, or an agent could
    /// not be destroyed.
    pub may_lose: bool,
}

impl std::fmt::Debug for Life {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Life")
            .field("no", &self.no)
            .field("place", &self.place)
            .finish_non_exhaustive()
    }
}

impl Life {
    pub(super) fn pool(&self) -> &Arc<KvPool> {
        self.stepped.engine.pool()
    }

    pub(super) fn now(&self) -> MonoTime {
        self.stepped.engine.now()
    }

    /// Blocks that are nobody's.
    pub(super) fn free(&self) -> Vec<u32> {
        (0..)
            .zip(&self.owners)
            .filter(|(_, owner)| **owner == Owner::Free)
            .map(|(block, _)| block)
            .collect()
    }

    pub(super) fn own(&mut self, block: u32, owner: Owner) {
        if let Some(slot) = self.owners.get_mut(block as usize) {
            *slot = owner;
        }
    }

    pub(super) fn owner(&self, block: u32) -> Option<Owner> {
        self.owners.get(block as usize).copied()
    }

    /// The engine writes something new into a block of its own. False when the pool refuses.
    pub(super) fn refill(&mut self, block: u32) -> bool {
        let at = block as usize;
        let Some(generation) = self.generations.get_mut(at) else {
            return false;
        };
        *generation = generation.saturating_add(1);
        let tag = content::tag(self.no, block, *generation);
        if let Some(known) = self.tags.get_mut(at) {
            *known = tag;
        }
        content::fill(self.stepped.engine.pool(), block, tag)
    }

    /// Meetings of a kind that are under way.
    pub(super) fn busy(&self, of: Errands) -> usize {
        self.pending.iter().filter(|p| p.thread == Some(of)).count()
    }
}

impl World {
    /// A place, and its first life.
    pub(super) fn add_place(&mut self) {
        let at = self.places.len();
        let port = u16::try_from(at).unwrap_or(0).saturating_add(5000);
        let bind = SocketAddr::from(([10, 0, 0, 1], port));
        // Clocks are hours apart, and do not go alike.
        let start = MonoTime::ZERO + Duration::from_secs(self.dice.within(10, 100_000) as u64);
        let faster = u32::try_from(self.dice.below(200)).unwrap_or(0);
        let names = EngineId::new(format!("engine-{at}"));
        let (Ok(name), Ok(addr)) = (names, PeerAddr::new("10.0.0.1", port)) else {
            return;
        };
        self.places.push(Place {
            name,
            addr,
            bind,
            clock: self.time.clock(start, faster),
            life: None,
            block_first: self.dice.chance(500),
            blocks: u32::try_from(self.dice.within(6, 16)).unwrap_or(6),
            word_base: 0,
        });
        self.start_life(at);
    }

    /// An engine starts at a place.
    pub(super) fn start_life(&mut self, place: usize) {
        let no = self.lives.len();
        let same_words = self.dice.chance(self.troubles.same_words);
        let (incarnation, word_base) = (self.dice.word() | 1, self.dice.word());
        let lanes = self.dice.within(1, 3);
        let idle = Duration::from_secs(if self.dice.chance(500) { 60 } else { 1 });
        // Shorter than some reads wait for what is held up, or longer than any.
        let silent = Duration::from_millis(if idle.as_secs() == 1 { 150 } else { 5000 });
        let active = u32::try_from(self.dice.within(1, 4)).unwrap_or(1);
        let (descriptors, in_flight) = (self.dice.within(1, 4), self.dice.within(1, 2));
        let queue = self.dice.within(1, 4);
        let Some(home) = self.places.get_mut(place) else {
            return;
        };
        if no == 0 || home.word_base == 0 || !same_words {
            home.word_base = word_base;
        }
        {
            let mut state = self.fabric.state();
            state.dead.push(false);
            state.places.push(place);
        }
        let pool = content::pool(&self.fabric, no, home.block_first, home.blocks);
        let Some(pool) = pool else { return };
        let mut config = EngineConfig::new(home.name.clone(), "world");
        config.holder.bind = Some(home.bind);
        config.holder.max_leases = 6;
        config.holder.default_ttl = MAX_TTL;
        config.holder.max_ttl = MAX_TTL;
        let reader = &mut config.reader;
        reader.queue = queue;
        reader.active = active;
        reader.window_descriptors = descriptors;
        reader.window_bytes = 64;
        reader.windows_in_flight = in_flight;
        reader.lanes = lanes;
        reader.wide_peers = 1;
        reader.abandon_after = ABANDON;
        reader.silent_after = silent;
        reader.connect_timeout = CONNECT;
        reader.max_peers = 2;
        reader.idle_peer = idle;
        reader.spare_agents = 0;
        reader.connect_threads = 1;
        let clock = Arc::clone(&home.clock);
        let cards = LifeCards::new(self.net.clone(), no, Arc::clone(&clock));
        let transport = Arc::new(LifeTransport::new(self.fabric.clone(), no));
        let (addr, blocks, word_base) = (home.addr.clone(), home.blocks as usize, home.word_base);
        let stepped = Stepped::start(
            config,
            Arc::clone(&pool),
            transport,
            Arc::clone(&clock) as Arc<dyn crate::clock::Clock>,
            Arc::new(cards) as Arc<dyn CardSource>,
            Birth {
                incarnation: Incarnation(incarnation),
                word_base,
            },
        );
        let stepped = match stepped {
            Ok(stepped) => stepped,
            Err(error) => {
                self.blame(Rule::NoEnd, || format!("an engine did not start: {error}"));
                return;
            }
        };
        home.life = Some(no);
        if let Some(answers) = &stepped.answers {
            self.net.open(addr, no, Arc::clone(answers), clock);
        }
        self.pools.push(pool);
        self.lives.push(Some(Life {
            no,
            place,
            stepped,
            owners: vec![Owner::Free; blocks],
            tags: vec![0; blocks],
            generations: vec![0; blocks],
            accepted: Vec::new(),
            pending: Vec::new(),
            open: Vec::new(),
            wake: MonoTime::FAR_FUTURE,
            lease_end: None,
            stopping: false,
            stop_by: MonoTime::FAR_FUTURE,
            may_lose: false,
        }));
        self.note(1, place, incarnation, || {
            format!("engine {place} starts as life {no}")
        });
    }

    /// The life at a place.
    pub(super) fn at(&self, place: usize) -> Option<usize> {
        self.places.get(place).and_then(|place| place.life)
    }

    pub(super) fn life(&mut self, no: usize) -> Option<&mut Life> {
        self.lives.get_mut(no).and_then(Option::as_mut)
    }

    /// A life picked at random.
    pub(super) fn any_life(&mut self) -> Option<usize> {
        // What one does takes several rounds of its own: it is left for another now and then only.
        if self.dice.chance(300) {
            self.focus = self.dice.below(self.places.len());
        }
        let place = if self.dice.chance(250) {
            self.dice.below(self.places.len())
        } else {
            self.focus
        };
        self.at(place)
    }
}
