//! Agents of the real NIXL.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nixl_sys::*;

use super::real_runtime;

/// Opens the real NIXL as a program does.
pub fn open() -> Arc<Library> {
    // SAFETY: the other thread of this process waits for this one.
    let environment = unsafe { Environment::recommended().apply() };
    assert_eq!(environment.outcome, EnvironmentOutcome::Applied);
    Library::open(&find_in(&real_runtime().unwrap()).unwrap()).unwrap()
}

/// An agent with a UCX backend and registered memory.
pub struct Peer {
    pub library: Arc<Library>,
    pub agent: AgentHandle,
    pub backend: BackendHandle,
    pub registered: RegDlistHandle,
    pub memory: Vec<u8>,
}

impl Peer {
    pub fn new(library: &Arc<Library>, name: &str, config: &AgentConfig, memory: Vec<u8>) -> Self {
        let whole = memory.len();
        Self::in_regions(library, name, config, memory, whole)
    }

    /// With memory that is registered in regions of `region` bytes.
    pub fn in_regions(
        library: &Arc<Library>,
        name: &str,
        config: &AgentConfig,
        memory: Vec<u8>,
        region: usize,
    ) -> Self {
        let library = library.clone();
        // SAFETY: one thread uses the handles, and the memory lives in the same struct until they are destroyed.
        unsafe {
            let agent = library
                .create_configured_agent(&c_string("name", name).unwrap(), config)
                .unwrap();
            let params = library.create_params().unwrap();
            let backend = library.create_backend(agent, c"UCX", params).unwrap();
            library.destroy_params(params).unwrap();
            let registered = library.create_reg_dlist(MemoryType::Dram).unwrap();
            for part in memory.chunks(region) {
                library
                    .reg_dlist_add_desc(registered, part.as_ptr().addr(), part.len(), 0, &[])
                    .unwrap();
            }
            library.register_mem(agent, registered, None).unwrap();
            Self {
                library,
                agent,
                backend,
                registered,
                memory,
            }
        }
    }

    pub fn metadata(&self) -> Buffer {
        // SAFETY: the agent is live.
        unsafe { self.library.get_local_md(self.agent) }.unwrap()
    }

    pub fn destroy(self) {
        // SAFETY: the handles are live and not used afterwards.
        unsafe {
            self.library
                .deregister_mem(self.agent, self.registered, None)
                .unwrap();
            self.library.destroy_reg_dlist(self.registered).unwrap();
            self.library.destroy_backend(self.backend).unwrap();
            self.library.destroy_agent(self.agent).unwrap();
        }
    }
}

/// A peer that only serves has to move by itself.
pub fn serving() -> AgentConfig {
    AgentConfig {
        progress_thread: true,
        progress_delay_us: 1000,
        ..AgentConfig::default()
    }
}

/// Calls `done` until it is.
pub fn until(mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(Instant::now() < deadline, "not done in 30 s");
        std::thread::sleep(Duration::from_micros(200));
    }
}
