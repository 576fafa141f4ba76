//! The participant `kv-xfer`: both ends are engines, and every case is a lease and a read of it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_xfer::descriptor::{BlockIdsJson, DescriptorLimits, Params};
use kv_xfer::engine::{
    Direction, Engine, EngineConfig, FailedBlocks, Landed, LeaseSpec, Offer, ReadFailure,
    ReadHandle, ReadRequest, ReleasePolicy,
};
use kv_xfer::identity::{BlockHash, HashChain, ModelIdentity, Salt};
use kv_xfer::ids::{BlockId, EngineId, LeaseId, RequestId};
use kv_xfer::memory::{KvPool, OwnedBlocks};
use kv_xfer::peer::PeerAddr;
use kv_xfer::side_channel::DialPolicy;
use kv_xfer::transport::nixl::NixlTransport;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::bare::BareCard;
use super::blocks::{self, Checked};
use super::cases::{BlockLists, Cases, check_list, check_lists};
use super::error::WorkerError;
use super::{Holder, NewCase, Reader, Start, bare, process_cpu_us};
use crate::bench::proto::Sample;
use crate::require;

/// A read ends by then.
const READ_LIMIT: Duration = Duration::from_secs(60);
/// Time beyond it for the engine to say so.
const GRACE: Duration = Duration::from_secs(5);
/// Leases outlast every bench.
const TTL: Duration = Duration::from_secs(3600);
/// Blocks under lease, all cases together; bounds what is remembered of them.
const MOST_LEASED: usize = 16 << 20;
/// What both ends call their model.
const MODEL: &str = "bench";

/// What a reader must know of a holder.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EngineCard {
    /// Host of its side channel.
    pub host: String,
    /// Port of its side channel.
    pub port: u16,
    /// Where bare reads find the same memory.
    #[serde(default)]
    pub bare: Option<BareCard>,
}

fn start(
    name: &str,
    start: &Start,
    about: &mut Map<String, Value>,
    change: impl FnOnce(&mut EngineConfig),
) -> Result<(Engine, Arc<KvPool>, Arc<NixlTransport>), WorkerError> {
    let transport = require::open()?;
    let pool = blocks::pool(&start.shape, &start.settings, about)?;
    let name = format!("bench-{name}-{}", std::process::id());
    let mut config = EngineConfig::new(EngineId::new(name)?, MODEL);
    config.tp_size = pool.layout().tp();
    config.require = require::required();
    config.cluster_key = crate::runtime::cluster_key()?;
    config.reader = start.settings.reader();
    change(&mut config);
    let engine = Engine::start(config, Arc::clone(&pool), Arc::clone(&transport))?;
    bare::describe(&transport, about);
    Ok((engine, pool, transport))
}

/// The chained hashes of a made-up prompt that fills so many blocks: those of one seed are the same
/// in every process.
fn hashes(pool: &KvPool, seed: u64, blocks: usize) -> Result<Vec<BlockHash>, WorkerError> {
    let block_tokens = pool.layout().block_tokens();
    let tokens = u32::try_from(blocks)?.saturating_mul(block_tokens);
    let salt = seed.to_le_bytes();
    let chain = HashChain::new(
        &ModelIdentity::new(MODEL, "")?,
        &Salt::new(&salt),
        block_tokens,
    )?;
    Ok(chain.hash_blocks(&(0..tokens).collect::<Vec<_>>()))
}

/// Leases blocks for each case.
pub struct EngineHolder {
    engine: Engine,
    pool: Arc<KvPool>,
    seed: u64,
    /// The lease of each case, and how many blocks it has.
    leases: HashMap<String, (LeaseId, usize)>,
    requests: u64,
    card: EngineCard,
    // Its registration of the memory lasts as long as this.
    _bare: Option<bare::Serving>,
}

impl EngineHolder {
    /// Makes and fills the pool, and serves it.
    pub fn start(args: &Start, about: &mut Map<String, Value>) -> Result<Self, WorkerError> {
        let settings = &args.settings;
        let (engine, pool, transport) = start("holder", args, about, |config| {
            config.holder.bind = Some(settings.bind);
            config.holder.advertise_host.clone_from(&settings.advertise);
            config.holder.default_ttl = TTL;
        })?;
        blocks::fill(&pool, args.seed)?;
        let address = engine
            .side_channel()
            .ok_or(WorkerError::OutOfTurn("the engine has no side channel"))?;
        let bare = match settings.ceiling {
            true => Some(bare::Serving::start(&transport, &pool)?),
            false => None,
        };
        let card = EngineCard {
            host: address.host(),
            port: address.port(),
            bare: bare.as_ref().map(|bare| bare.card().clone()),
        };
        Ok(Self {
            engine,
            pool,
            seed: args.seed,
            leases: HashMap::new(),
            requests: 0,
            card,
            _bare: bare,
        })
    }
}

impl Holder for EngineHolder {
    fn card(&self) -> Result<Value, WorkerError> {
        serde_json::to_value(&self.card).map_err(WorkerError::json("card"))
    }

    fn case(&mut self, name: &str, remote: Vec<u32>) -> Result<Option<Value>, WorkerError> {
        check_list(name, &remote, self.pool.block_count())?;
        if let Some((lease, _)) = self.leases.remove(name) {
            self.engine.revoke(lease);
        }
        // Nobody wants them back.
        while self.engine.freed().try_recv().is_ok() {}
        let leased: usize = self.leases.values().map(|(_, blocks)| blocks).sum();
        if leased.saturating_add(remote.len()) > MOST_LEASED {
            return Err(WorkerError::Lease(format!(
                "{MOST_LEASED} blocks at most are held for all cases together"
            )));
        }
        let blocks = remote.len();
        self.requests += 1;
        let hashes = hashes(&self.pool, self.seed, remote.len())?;
        let tokens = remote.len() as u64 * u64::from(self.pool.layout().block_tokens());
        let leased = self
            .engine
            .lease(LeaseSpec {
                request: RequestId::new(format!("bench-{}", self.requests))?,
                blocks: remote.into_iter().map(BlockId).collect(),
                tokens,
                hashes,
                ttl: Some(TTL),
                direction: Direction::DecodeToPrefill,
                tenant: None,
                conversation: None,
            })
            .map_err(|refused| WorkerError::Lease(refused.to_string()))?;
        self.leases.insert(name.to_owned(), (leased.lease, blocks));
        let params = leased.remote.to_json_value(BlockIdsJson::Omitted);
        Ok(Some(json!({ "kv_transfer_params": params })))
    }
}

#[derive(Debug)]
struct EngineCase {
    lists: BlockLists,
    offer: Offer,
    hashes: Vec<BlockHash>,
    /// The destination, while a run is on.
    owned: Option<OwnedBlocks>,
}

/// Reads leases.
pub struct EngineReader {
    engine: Engine,
    pool: Arc<KvPool>,
    seed: u64,
    cases: Cases<EngineCase>,
}

impl EngineReader {
    /// Makes the pool and starts the engine. Only the holder of the card may be dialled.
    pub fn start(args: &Start, about: &mut Map<String, Value>) -> Result<Self, WorkerError> {
        let card = args.card.clone().unwrap_or_default();
        let card: EngineCard = serde_json::from_value(card).map_err(WorkerError::json("card"))?;
        let peer = PeerAddr::new(&card.host, card.port)
            .map_err(|error| WorkerError::Setting(error.to_string()))?;
        let (engine, pool, _) = start("reader", args, about, |config| {
            config.dial = DialPolicy::configured_only([peer]);
        })?;
        about.insert("lanes".into(), args.settings.reader().lanes.into());
        Ok(Self {
            engine,
            pool,
            seed: args.seed,
            cases: Cases::default(),
        })
    }

    fn claim(&mut self, names: &[String]) -> Result<(), WorkerError> {
        for name in names {
            let case = self.cases.get_mut(name)?;
            if case.owned.is_none() {
                let ids = case.lists.local.iter().copied().map(BlockId).collect();
                case.owned = Some(self.pool.claim(ids)?);
            }
        }
        Ok(())
    }

    fn submit(&mut self, name: &str) -> Result<ReadHandle, WorkerError> {
        let case = self.cases.get_mut(name)?;
        let blocks = case
            .owned
            .take()
            .ok_or(WorkerError::OutOfTurn("the destination is not claimed"))?;
        self.engine
            .read(ReadRequest {
                offer: &case.offer,
                hashes: &case.hashes,
                span: 0..case.hashes.len(),
                blocks,
                timeout: READ_LIMIT,
                release: ReleasePolicy::Never,
            })
            .map_err(|refused| WorkerError::Submit(refused.to_string()))
    }
}

impl Reader for EngineReader {
    fn case(&mut self, case: NewCase) -> Result<(), WorkerError> {
        let NewCase {
            name,
            lists,
            ticket,
        } = case;
        check_lists(&name, &lists, self.pool.block_count())?;
        let params = ticket
            .and_then(|mut ticket| Some(ticket.get_mut("kv_transfer_params")?.take()))
            .unwrap_or_default();
        let refuse = |why: String| WorkerError::Case {
            name: name.clone(),
            why,
        };
        let Params::Remote(remote) = Params::from_json_value(params, &DescriptorLimits::default())?
        else {
            return Err(refuse("its ticket offers no blocks".to_owned()));
        };
        let offer = self.engine.accept(&remote, None, None)?;
        let hashes = hashes(&self.pool, self.seed, lists.remote.len())?;
        let case = EngineCase {
            lists,
            offer,
            hashes,
            owned: None,
        };
        self.cases.put(name, case);
        Ok(())
    }

    fn prepare(&mut self, names: &[String]) -> Result<(), WorkerError> {
        self.claim(names)
    }

    fn once(&mut self, names: &[String]) -> Result<Sample, WorkerError> {
        let mut handles = Vec::with_capacity(names.len());
        let cpu = process_cpu_us();
        let start = Instant::now();
        for name in names {
            handles.push(self.submit(name)?);
        }
        let submitted = start.elapsed();
        let mut sample = Sample {
            submit_us: submitted.as_secs_f64() * 1e6,
            total_us: 0.0,
            first_layer_us: None,
            descriptors: 0,
            bytes: 0,
            cpu_us: 0.0,
        };
        let mut landed = Vec::with_capacity(names.len());
        for mut handle in handles {
            match handle.wait_timeout(READ_LIMIT + GRACE) {
                Some(Ok(Landed { blocks, report })) => {
                    let first = report.first_layer.as_secs_f64() * 1e6;
                    sample.first_layer_us =
                        Some(sample.first_layer_us.map_or(first, |us: f64| us.min(first)));
                    sample.descriptors += report.descriptors;
                    sample.bytes += report.bytes;
                    landed.push(blocks);
                }
                Some(Err(ReadFailure { error, blocks })) => {
                    if let FailedBlocks::Returned(blocks) = blocks {
                        let _ = blocks.into_ids();
                    }
                    return Err(WorkerError::Read(error.to_string()));
                }
                None => return Err(WorkerError::Late(READ_LIMIT + GRACE)),
            }
        }
        sample.total_us = start.elapsed().as_secs_f64() * 1e6;
        sample.cpu_us = process_cpu_us() - cpu;
        for (name, blocks) in names.iter().zip(landed) {
            self.cases.get_mut(name)?.owned = Some(blocks);
        }
        Ok(sample)
    }

    fn spoil(&mut self, name: &str, sample: u32) -> Result<(), WorkerError> {
        let case = self.cases.get_mut(name)?;
        let Some(owned) = &mut case.owned else {
            return Err(WorkerError::OutOfTurn("the destination is not claimed"));
        };
        for index in blocks::spread(owned.len(), sample) {
            for (region, geometry) in self.pool.regions().iter().enumerate() {
                let bytes = vec![blocks::SPOILED; usize::try_from(geometry.block_len)?];
                owned.write_at(index, region, 0, &bytes)?;
            }
        }
        Ok(())
    }

    fn check(&mut self, name: &str, sample: u32) -> Result<Checked, WorkerError> {
        let lists = &self.cases.get(name)?.lists;
        check_blocks(&self.pool, self.seed, lists, sample)
    }

    fn finish(&mut self) {
        for case in self.cases.all_mut() {
            case.owned = None;
        }
        // What a failed read gave back later.
        while self.engine.returned().try_recv().is_ok() {}
    }
}

/// Checks a sample of a case's blocks in all regions.
pub fn check_blocks(
    pool: &KvPool,
    seed: u64,
    lists: &BlockLists,
    sample: u32,
) -> Result<Checked, WorkerError> {
    let mut checked = Checked::default();
    for index in blocks::spread(lists.local.len(), sample) {
        let pair = lists.remote.get(index).zip(lists.local.get(index));
        let Some((remote, local)) = pair else {
            continue;
        };
        for (region, _) in (0..).zip(pool.regions()) {
            blocks::check_region(pool, seed, region, *remote, *local, &mut checked)?;
        }
    }
    Ok(checked)
}
