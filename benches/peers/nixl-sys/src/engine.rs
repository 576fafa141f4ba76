//! The crate at work.

use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nixl_sys::{
    Agent, AgentConfig, MemType, NotificationMap, OptArgs, RegistrationHandle, XferDescList,
    XferDlistHandle, XferOp, XferRequest,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::Failure;
use crate::memory::Memory;
use crate::proto::{Role, Shape};

const BACKEND: &str = "UCX";
/// What the agent's own side is called in lists.
const SELF: &str = "";
const READ_LIMIT: Duration = Duration::from_secs(120);

/// What a holder tells its reader.
#[derive(Serialize, Deserialize)]
struct Card {
    metadata: String,
    bases: Vec<usize>,
}

/// A read to come.
pub struct Case {
    remote: Vec<u32>,
    local: Vec<u32>,
}

impl Case {
    pub fn blocks(&self) -> u64 {
        self.local.len() as u64
    }

    /// So many pairs, evenly spread.
    pub fn sampled(&self, wanted: u32) -> impl Iterator<Item = (u32, u32)> {
        let count = self.local.len();
        let wanted = count.min(wanted as usize);
        (0..wanted)
            .map(move |i| i * count / wanted)
            .map(|at| (self.remote[at], self.local[at]))
    }

    /// How many runs follow one another on both sides: those NIXL merges.
    fn runs(&self) -> u64 {
        let follows = |ids: &[u32]| ids[0].checked_add(1) == Some(ids[1]);
        let pairs = self.remote.windows(2).zip(self.local.windows(2));
        1 + pairs.filter(|(r, l)| !(follows(r) && follows(l))).count() as u64
    }
}

/// Either end. Fields are dropped in this order: lists before the agent that made them.
pub struct Engine {
    lists: Option<(XferDlistHandle, XferDlistHandle)>,
    _registered: Vec<RegistrationHandle>,
    notify: OptArgs,
    agent: Agent,
    role: Role,
    memory: Memory,
    tcp: bool,
    progress_thread: bool,
}

impl Engine {
    pub fn new(
        role: Role,
        memory: Memory,
        settings: &Map<String, Value>,
        card: Option<Value>,
    ) -> Result<Self, Failure> {
        let text = |name| settings.get(name).and_then(Value::as_str);
        if text("memory").is_some_and(|memory| memory != "host") {
            return Err("it reads host memory only".into());
        }
        let tcp = text("transport") == Some("tcp");
        if tcp {
            // SAFETY: this process has one thread until NIXL is loaded, which is below.
            unsafe { std::env::set_var("UCX_TLS", "tcp") };
        }
        if nixl_sys::is_stub() {
            return Err("nixl-sys finds no libnixl_capi.so by LD_LIBRARY_PATH".into());
        }
        let name = format!("{role:?}-{}", std::process::id());
        let config = AgentConfig::default();
        let wanted = settings.get("progress_thread").and_then(Value::as_bool);
        let progress_thread = wanted.unwrap_or(config.enable_prog_thread);
        let agent = Agent::new_configured(
            &name,
            &AgentConfig {
                enable_prog_thread: progress_thread,
                ..config
            },
        )?;
        let (_, parameters) = agent.get_plugin_params(BACKEND)?;
        let backend = agent.create_backend(BACKEND, &parameters)?;
        let mut options = OptArgs::new()?;
        options.add_backend(&backend)?;
        let registered = memory
            .regions
            .iter()
            .map(|region| agent.register_memory(region, Some(&options)))
            .collect::<Result<Vec<_>, _>>()?;
        let mut notify = OptArgs::new()?;
        notify.set_has_notification(true)?;
        notify.set_notification_message(b"read:1")?;
        let lists = match role {
            Role::Holder => None,
            Role::Reader => {
                let card: Card = serde_json::from_value(card.ok_or("a reader needs a card")?)?;
                let remote = agent.load_remote_md(&STANDARD.decode(card.metadata)?)?;
                let own: Vec<_> = memory.regions.iter().map(|r| r.address()).collect();
                let local = all_blocks(&own, memory.shape)?;
                let there = all_blocks(&card.bases, memory.shape)?;
                Some((
                    agent.prepare_xfer_dlist(SELF, &local, Some(&options))?,
                    agent.prepare_xfer_dlist(&remote, &there, Some(&options))?,
                ))
            }
        };
        Ok(Self {
            lists,
            _registered: registered,
            notify,
            agent,
            role,
            memory,
            tcp,
            progress_thread,
        })
    }

    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    pub fn card(&self) -> Result<Option<Value>, Failure> {
        if self.role == Role::Reader {
            return Ok(None);
        }
        let card = Card {
            metadata: STANDARD.encode(self.agent.get_local_md()?),
            bases: self.memory.regions.iter().map(|r| r.address()).collect(),
        };
        Ok(Some(serde_json::to_value(card)?))
    }

    pub fn about(&self) -> Map<String, Value> {
        let about = [
            ("library", json!("nixl-sys")),
            ("version", json!("1.5.2")),
            ("transport", json!(if self.tcp { "tcp" } else { "auto" })),
            ("memory", json!("host")),
            ("progress_thread", json!(self.progress_thread)),
        ];
        Map::from_iter(about.map(|(name, value)| (name.to_owned(), value)))
    }

    pub fn case(&self, remote: Vec<u32>, local: Vec<u32>) -> Result<Case, Failure> {
        let blocks = self.memory.shape.blocks;
        if remote.len() != local.len() || remote.is_empty() {
            return Err("as many local blocks as remote ones, and at least one".into());
        }
        if remote.iter().chain(&local).any(|block| *block >= blocks) {
            return Err(format!("a block id is not below {blocks}").into());
        }
        // Indices of lists are 32-bit numbers.
        i32::try_from(u64::from(blocks) * u64::from(self.memory.shape.regions))?;
        Ok(Case { remote, local })
    }

    pub fn descriptors(&self, case: &Case) -> u64 {
        u64::from(self.memory.shape.regions) * case.runs()
    }

    pub fn submit(&self, case: &Case) -> Result<XferRequest, Failure> {
        let (local, remote) = self.lists.as_ref().ok_or("only a reader reads")?;
        let request = self.agent.make_xfer_req(
            XferOp::Read,
            local,
            &self.indices(&case.local),
            remote,
            &self.indices(&case.remote),
            Some(&self.notify),
        )?;
        self.agent.post_xfer_req(&request, None)?;
        Ok(request)
    }

    fn indices(&self, ids: &[u32]) -> Vec<i32> {
        let shape = self.memory.shape;
        let mut indices = Vec::with_capacity(ids.len() * shape.regions as usize);
        for region in 0..shape.regions {
            indices.extend(
                ids.iter()
                    .map(|id| (region * shape.blocks + id).cast_signed()),
            );
        }
        indices
    }

    pub fn wait(&self, requests: &[XferRequest]) -> Result<(), Failure> {
        let end = Instant::now() + READ_LIMIT;
        for request in requests {
            while !self.agent.get_xfer_status(request)?.is_success() {
                if Instant::now() > end {
                    return Err(format!("the read did not end within {READ_LIMIT:?}").into());
                }
            }
        }
        Ok(())
    }

    /// Serves a holder's agent; tells after how long to come again, if at all.
    pub fn idle(&self) -> Result<Option<Duration>, Failure> {
        if self.role == Role::Reader {
            return Ok(None);
        }
        self.agent
            .get_notifications(&mut NotificationMap::new()?, None)?;
        // Over TCP the holder's own processor sends what is read. Without a progress thread that
        // happens here.
        let alone = self.tcp && !self.progress_thread;
        Ok(Some(Duration::from_millis(u64::from(!alone))))
    }
}

fn all_blocks(bases: &[usize], shape: Shape) -> Result<XferDescList<'static>, Failure> {
    if bases.len() != shape.regions as usize {
        return Err("the holder has another number of regions".into());
    }
    let length = usize::try_from(shape.block_bytes)?;
    let mut list = XferDescList::new(MemType::Dram)?;
    for base in bases {
        for block in 0..shape.blocks as usize {
            list.add_desc(base + block * length, length, 0);
        }
    }
    Ok(list)
}
