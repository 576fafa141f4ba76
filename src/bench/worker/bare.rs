//! The participant `one-descriptor`: agents of this library's transport without an engine. It reads
//! as many bytes as the case has, at one piece; or, so that what the engine adds can be told, the
//! very descriptors that the engine would post, all in one window.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use kv_xfer::ids::{AgentName, BlockId};
use kv_xfer::layout::{RegionGeometry, pair_regions};
use kv_xfer::memory::KvPool;
use kv_xfer::plan::{Cursor, Plan, PlanInput, PlanLimits};
use kv_xfer::transport::nixl::{NixlAgent, NixlTransport};
use kv_xfer::transport::{Agent, AgentRole, Descriptor, Ends, Progress, Transport};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::blocks::{self, Checked};
use super::cases::{BlockLists, Cases, check_list, check_lists};
use super::engine::check_blocks;
use super::error::WorkerError;
use super::{Holder, NewCase, Reader, Start, process_cpu_us};
use crate::bench::proto::Sample;
use crate::require;

/// A read ends by then, or the participant gives up.
const READ_LIMIT: Duration = Duration::from_secs(60);

/// What a bare reader must know: an agent, and the one span of memory that it serves.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BareCard {
    agent: AgentName,
    /// NIXL's metadata, base64.
    metadata: String,
    span: RegionGeometry,
    regions: Vec<RegionGeometry>,
}

/// Tells what moves the bytes.
pub fn describe(transport: &NixlTransport, about: &mut Map<String, Value>) {
    let info = transport.info();
    about.insert("library".into(), info.name.into());
    about.insert("version".into(), info.version.into());
    about.insert("backend".into(), info.backend.into());
}

/// All regions of a pool as one array of one block.
fn span(pool: &KvPool) -> Result<RegionGeometry, WorkerError> {
    let none = WorkerError::OutOfTurn("the pool has no regions");
    let (Some(first), Some(last)) = (pool.regions().first(), pool.regions().last()) else {
        return Err(none);
    };
    let end = last.base.saturating_add(last.byte_len()?);
    let len = end.saturating_sub(first.base);
    Ok(RegionGeometry {
        block_len: len,
        block_stride: len,
        block_count: 1,
        ..*first
    })
}

fn open(
    transport: &NixlTransport,
    pool: &Arc<KvPool>,
    role: AgentRole,
) -> Result<(NixlAgent, AgentName, RegionGeometry), WorkerError> {
    let what = match role {
        AgentRole::Serve => "holder",
        AgentRole::Read => "reader",
    };
    let name = AgentName::new(format!("bench-bare-{what}-{}", std::process::id()))?;
    let mut agent = transport.open_agent(&name, role)?;
    let span = span(pool)?;
    let keep = Arc::clone(pool) as Arc<dyn Any + Send + Sync>;
    agent.register(&[span], keep)?;
    Ok((agent, name, span))
}

/// An agent that serves a pool's memory.
pub struct Serving {
    card: BareCard,
    _agent: NixlAgent,
}

impl Serving {
    /// Registers the memory.
    pub fn start(transport: &NixlTransport, pool: &Arc<KvPool>) -> Result<Self, WorkerError> {
        let (mut agent, name, span) = open(transport, pool, AgentRole::Serve)?;
        let card = BareCard {
            agent: name,
            metadata: BASE64.encode(agent.metadata()?),
            span,
            regions: pool.regions().to_vec(),
        };
        Ok(Self {
            card,
            _agent: agent,
        })
    }

    /// What a reader must know.
    pub fn card(&self) -> &BareCard {
        &self.card
    }
}

/// Serves a pool to bare readers.
pub struct BareHolder {
    pool: Arc<KvPool>,
    serving: Serving,
}

impl BareHolder {
    /// Makes and fills the pool, and registers it.
    pub fn start(args: &Start, about: &mut Map<String, Value>) -> Result<Self, WorkerError> {
        let transport = require::open()?;
        describe(&transport, about);
        let pool = blocks::pool(&args.shape, &args.settings, about)?;
        blocks::fill(&pool, args.seed)?;
        let serving = Serving::start(&transport, &pool)?;
        Ok(Self { pool, serving })
    }
}

impl Holder for BareHolder {
    fn card(&self) -> Result<Value, WorkerError> {
        let card = BTreeMap::from([("bare", self.serving.card())]);
        serde_json::to_value(card).map_err(WorkerError::json("card"))
    }

    fn case(&mut self, name: &str, remote: Vec<u32>) -> Result<Option<Value>, WorkerError> {
        check_list(name, &remote, self.pool.block_count())?;
        Ok(None)
    }
}

#[derive(Debug)]
struct BareCase {
    lists: BlockLists,
    descriptors: Vec<Descriptor>,
    bytes: u64,
}

/// Reads without an engine.
pub struct BareReader {
    agent: NixlAgent,
    pool: Arc<KvPool>,
    seed: u64,
    peer: BareCard,
    span: RegionGeometry,
    same_descriptors: bool,
    write: bool,
    cases: Cases<BareCase>,
}

#[derive(Deserialize)]
struct AnyCard {
    bare: BareCard,
}

impl BareReader {
    /// Makes the pool, and loads the holder's metadata.
    pub fn start(args: &Start, about: &mut Map<String, Value>) -> Result<Self, WorkerError> {
        let card = args.card.clone().unwrap_or_default();
        let AnyCard { bare: peer } =
            serde_json::from_value(card).map_err(WorkerError::json("card"))?;
        let transport = require::open()?;
        describe(&transport, about);
        let pool = blocks::pool(&args.shape, &args.settings, about)?;
        let (mut agent, _, span) = open(&transport, &pool, AgentRole::Read)?;
        let metadata = BASE64
            .decode(&peer.metadata)
            .map_err(|error| WorkerError::Setting(format!("the card's metadata: {error}")))?;
        agent.load_peer(&metadata, &peer.agent)?;
        // Something else than the holder's pattern, which it then has in its place.
        let seed = match args.settings.write {
            true => args.seed.wrapping_add(1),
            false => args.seed,
        };
        if args.settings.write {
            blocks::fill(&pool, seed)?;
        }
        Ok(Self {
            agent,
            pool,
            seed,
            peer,
            span,
            same_descriptors: args.settings.same_descriptors,
            write: args.settings.write,
            cases: Cases::default(),
        })
    }

    fn plan(&self, lists: &BlockLists) -> Result<Vec<Descriptor>, WorkerError> {
        let layout = self.pool.layout();
        let pairs = pair_regions(layout, self.pool.regions(), layout, &self.peer.regions)?;
        let ids = |list: &[u32]| list.iter().copied().map(BlockId).collect::<Vec<_>>();
        let plan = Plan::new(PlanInput {
            remote_blocks: &ids(&lists.remote),
            local_blocks: &ids(&lists.local),
            pairs: &pairs,
            remote_block_count: self.pool.block_count(),
            local_block_count: self.pool.block_count(),
            limits: PlanLimits::default(),
        })?;
        let mut descriptors = Vec::new();
        let _ = plan.next_window(
            &mut Cursor::default(),
            usize::MAX,
            u64::MAX,
            &mut descriptors,
        );
        Ok(descriptors)
    }

    /// Overwrites the memory with what the holder has.
    fn read_back(&mut self, name: &str) -> Result<(), WorkerError> {
        for block in 0..self.pool.block_count() {
            blocks::spoil(&self.pool, block)?;
        }
        self.write = false;
        let read = self.once(&[name.to_owned()]);
        self.write = true;
        read.map(drop)
    }

    /// Whether the first `bytes` bytes of the memory hold a block of a region whole.
    fn reaches(&self, geometry: &RegionGeometry, block: u32, bytes: u64) -> bool {
        geometry
            .block_addr(BlockId(block))
            .is_ok_and(|addr| addr - self.span.base + geometry.block_len <= bytes)
    }
}

impl Reader for BareReader {
    fn case(&mut self, case: NewCase) -> Result<(), WorkerError> {
        let NewCase { name, lists, .. } = case;
        check_lists(&name, &lists, self.pool.block_count())?;
        let bytes = (lists.remote.len() as u64).saturating_mul(self.pool.layout().block_bytes());
        let descriptors = if self.same_descriptors {
            self.plan(&lists)?
        } else {
            vec![Descriptor {
                remote: self.peer.span.base,
                local: self.span.base,
                len: bytes.min(self.span.block_len).min(self.peer.span.block_len),
            }]
        };
        let case = BareCase {
            lists,
            descriptors,
            bytes,
        };
        self.cases.put(name, case);
        Ok(())
    }

    fn once(&mut self, names: &[String]) -> Result<Sample, WorkerError> {
        let mut requests = Vec::with_capacity(names.len());
        let (mut descriptors, mut bytes) = (0, 0);
        let cpu = process_cpu_us();
        let start = Instant::now();
        for name in names {
            let case = self.cases.get(name)?;
            let (peer, descriptors_of) = (&self.peer.agent, &case.descriptors);
            let ends = Ends {
                remote_mem: self.peer.span.mem,
                remote_device: self.peer.span.device,
                local_mem: self.span.mem,
                local_device: self.span.device,
            };
            requests.push(if self.write {
                self.agent.post_write(peer, ends, descriptors_of)?
            } else {
                self.agent.post_read(peer, ends, descriptors_of)?
            });
            descriptors += case.descriptors.len() as u64;
            bytes += case.bytes;
        }
        let submit_us = start.elapsed().as_secs_f64() * 1e6;
        for (request, progress) in &mut requests {
            while *progress == Progress::Pending {
                *progress = self.agent.poll(request)?;
                if start.elapsed() > READ_LIMIT {
                    return Err(WorkerError::Late(READ_LIMIT));
                }
            }
        }
        let total_us = start.elapsed().as_secs_f64() * 1e6;
        let cpu_us = process_cpu_us() - cpu;
        for (request, _) in requests {
            self.agent.discard(request);
        }
        Ok(Sample {
            submit_us,
            total_us,
            first_layer_us: None,
            descriptors,
            bytes,
            cpu_us,
        })
    }

    fn spoil(&mut self, name: &str, sample: u32) -> Result<(), WorkerError> {
        if self.write {
            // It is the source; what the holder got is read back.
            return Ok(());
        }
        let case = self.cases.get(name)?;
        if self.same_descriptors {
            for index in blocks::spread(case.lists.local.len(), sample) {
                let block = case.lists.local.get(index).copied();
                blocks::spoil(&self.pool, block.unwrap_or_default())?;
            }
            return Ok(());
        }
        for block in blocks::spread(usize::try_from(self.pool.block_count())?, sample) {
            blocks::spoil(&self.pool, u32::try_from(block)?)?;
        }
        Ok(())
    }

    fn check(&mut self, name: &str, sample: u32) -> Result<Checked, WorkerError> {
        if self.write {
            self.read_back(name)?;
        }
        let case = self.cases.get(name)?;
        if self.same_descriptors {
            return check_blocks(&self.pool, self.seed, &case.lists, sample);
        }
        // The piece begins at the first byte of the first region on both sides.
        let mut checked = Checked::default();
        for block in blocks::spread(usize::try_from(self.pool.block_count())?, sample) {
            let block = u32::try_from(block)?;
            for (region, geometry) in (0..).zip(self.pool.regions()) {
                if self.reaches(geometry, block, case.bytes) {
                    let seed = self.seed;
                    blocks::check_region(&self.pool, seed, region, block, block, &mut checked)?;
                }
            }
        }
        Ok(checked)
    }
}
