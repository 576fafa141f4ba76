//! The same descriptors by NIXL alone: no engine, no lease, no other thread.

use std::any::Any;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kv_xfer::clock::SystemClock;
use kv_xfer::engine::{CardSource, ConnectError, EngineConfig, SideChannelCards};
use kv_xfer::ids::{AgentName, BlockId, EngineId, Rank};
use kv_xfer::layout::{KvLayout, RegionPair, pair_regions};
use kv_xfer::memory::KvPool;
use kv_xfer::peer::{CardFault, CardLimits, PeerAddr, encode_reply};
use kv_xfer::plan::{Cursor, Plan, PlanInput, PlanLimits};
use kv_xfer::transport::nixl::{NixlAgent, NixlTransport};
use kv_xfer::transport::{Agent, AgentRole, Descriptor, Ends, Progress, Transport};

use super::fixture::{BenchError, LIMIT};
use crate::runtime;

/// How long each part of meeting a peer took, in the order in which an engine does them.
#[derive(Debug, Clone, Copy, Default)]
pub struct Meeting {
    /// Fetching and checking its card over the side channel.
    pub card: Duration,
    /// Decoding the layout and pairing the regions.
    pub pair: Duration,
    /// Creating an agent.
    pub open: Duration,
    /// Registering the local pool with it.
    pub register: Duration,
    /// Loading the peer's metadata.
    pub load: Duration,
    /// The first read of eight bytes, which makes the connection.
    pub first: Duration,
    /// Bytes of the card on the wire.
    pub card_bytes: usize,
}

/// Time inside post, and until the last byte was known to be there.
#[derive(Debug, Clone, Copy, Default)]
pub struct BareTiming {
    /// Inside the post calls.
    pub post: Duration,
    /// From before the first post.
    pub total: Duration,
}

/// One agent that reads from one peer.
pub struct Bare {
    agent: NixlAgent,
    peer: AgentName,
    pairs: Vec<RegionPair>,
    remote_blocks: u32,
    local_blocks: u32,
    words: u64,
    landing: u64,
}

impl Bare {
    /// Meets a peer as an engine does, step by step.
    ///
    /// # Errors
    /// [`BenchError`].
    pub fn meet(
        name: &str,
        transport: &NixlTransport,
        pool: &Arc<KvPool>,
        address: &PeerAddr,
    ) -> Result<(Self, Meeting), BenchError> {
        let mut config = EngineConfig::new(EngineId::new(name)?, "bench");
        config.cluster_key = runtime::cluster_key()?;
        let cards = SideChannelCards::new(&config, pool.layout(), Arc::new(SystemClock));
        let mut meeting = Meeting::default();
        let mut last = Instant::now();
        let mut lap = |part: &mut Duration| {
            let now = Instant::now();
            *part = now.saturating_duration_since(last);
            last = now;
        };
        let fetched = cards.fetch(address, Rank::default(), LIMIT);
        let card = fetched
            .map_err(|e: ConnectError| BenchError::Holder(e.to_string()))?
            .card;
        lap(&mut meeting.card);
        let layout =
            KvLayout::from_bytes(&card.layout).map_err(|e| BenchError::Holder(e.to_string()))?;
        let pairs = pair_regions(pool.layout(), pool.regions(), &layout, &card.regions)
            .map_err(|e| BenchError::Holder(e.to_string()))?;
        lap(&mut meeting.pair);
        let mut agent = transport.open_agent(&AgentName::new(name)?, AgentRole::Read)?;
        lap(&mut meeting.open);
        let words = transport.control_words(1)?;
        agent.register(
            pool.regions(),
            Arc::clone(pool) as Arc<dyn Any + Send + Sync>,
        )?;
        agent.register(&[words.region()], Arc::new(Arc::clone(&words)))?;
        lap(&mut meeting.register);
        agent.load_peer(&card.nixl_metadata, &card.agent)?;
        lap(&mut meeting.load);
        let mut bare = Self {
            agent,
            peer: card.agent.clone(),
            pairs,
            remote_blocks: card.regions.first().map_or(0, |region| region.block_count),
            local_blocks: pool.block_count(),
            words: card.lease_words.base,
            landing: words.region().base,
        };
        bare.connect()?;
        lap(&mut meeting.first);
        let encoded = encode_reply(&card, None, &CardLimits::default());
        let encoded = encoded.map_err(|e: CardFault| BenchError::Holder(e.to_string()))?;
        meeting.card_bytes = encoded.len();
        Ok((bare, meeting))
    }

    /// Reads a word, and sleeps between polls: making the connection takes a while, and the peer may
    /// need this processor for it.
    fn connect(&mut self) -> Result<(), BenchError> {
        let post = self.agent.post_read(&self.peer, Ends::HOST, &[self.word()]);
        let (mut request, mut progress) = post.map_err(|fault| fault.error)?;
        while progress == Progress::Pending {
            thread::sleep(Duration::from_micros(100));
            progress = self.agent.poll(&mut request).map_err(|fault| fault.error)?;
        }
        self.agent.discard(request);
        Ok(())
    }

    /// The descriptors that an engine would post for these blocks, in its order.
    ///
    /// # Errors
    /// [`BenchError`] when there is no such read.
    pub fn plan(&self, remote: &[u32], local: &[u32]) -> Result<Vec<Descriptor>, BenchError> {
        let ids = |blocks: &[u32]| blocks.iter().copied().map(BlockId).collect::<Vec<_>>();
        let plan = Plan::new(PlanInput {
            remote_blocks: &ids(remote),
            local_blocks: &ids(local),
            pairs: &self.pairs,
            remote_block_count: self.remote_blocks,
            local_block_count: self.local_blocks,
            limits: PlanLimits::default(),
        })
        .map_err(|error| BenchError::Submit(error.to_string()))?;
        let mut cursor = Cursor::default();
        let mut window = Vec::new();
        let mut all = Vec::new();
        while plan
            .next_window(&mut cursor, usize::MAX, u64::MAX, &mut window)
            .is_some()
        {
            all.append(&mut window);
        }
        Ok(all)
    }

    /// Reads descriptors in windows of at most so many, up to four in flight.
    ///
    /// # Errors
    /// [`BenchError::Transport`].
    pub fn read(
        &mut self,
        descriptors: &[Descriptor],
        window: usize,
    ) -> Result<BareTiming, BenchError> {
        const IN_FLIGHT: usize = 4;
        let start = Instant::now();
        let mut timing = BareTiming::default();
        let mut flying = std::collections::VecDeque::new();
        let mut windows = descriptors.chunks(window.max(1));
        loop {
            let mut idle = true;
            if flying.len() < IN_FLIGHT
                && let Some(window) = windows.next()
            {
                let before = Instant::now();
                let (request, progress) = self
                    .agent
                    .post_read(&self.peer, Ends::HOST, window)
                    .map_err(|fault| fault.error)?;
                timing.post += before.elapsed();
                flying.push_back((request, progress));
                idle = false;
            }
            for (request, progress) in &mut flying {
                if *progress == Progress::Pending {
                    *progress = self.agent.poll(request).map_err(|fault| fault.error)?;
                    idle = false;
                }
            }
            while flying
                .front()
                .is_some_and(|(_, progress)| *progress == Progress::Done)
            {
                if let Some((request, _)) = flying.pop_front() {
                    self.agent.discard(request);
                }
            }
            if idle && flying.is_empty() {
                timing.total = start.elapsed();
                return Ok(timing);
            }
        }
    }

    /// Reads the holder's first lease word.
    ///
    /// # Errors
    /// [`BenchError::Transport`].
    pub fn read_word(&mut self) -> Result<BareTiming, BenchError> {
        self.read(&[self.word()], 1)
    }

    fn word(&self) -> Descriptor {
        Descriptor {
            remote: self.words,
            local: self.landing,
            len: 8,
        }
    }

    /// Destroys the agent.
    ///
    /// # Errors
    /// [`BenchError::Transport`].
    pub fn end(self) -> Result<(), BenchError> {
        Ok(self.agent.destroy()?)
    }
}
