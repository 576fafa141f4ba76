//! One NIXL agent with one backend.

use std::any::Any;
use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nixl_sys::{
    AgentConfig, AgentHandle, BackendHandle, CallError, Library, MemoryType, NotifMapHandle,
    OptArgsHandle, Progress as NixlProgress, RegDlistHandle, XferDlistHandle, XferOp,
    XferReqHandle, c_string,
};

use super::fault::{error, exiting, refused};
use super::gate;
use crate::ids::AgentName;
use crate::layout::{MemKind, RegionGeometry};
use crate::transport::{
    AfterError, Agent, Descriptor, Ends, FailureKind, Progress, ReadFault, TransportError,
};

/// Pause between polls of a peer that is being reached.
const REACH_NAP: Duration = Duration::from_micros(50);

/// A posted NIXL request.
#[derive(Debug)]
pub(crate) struct DirectRequest(XferReqHandle);

/// Descriptor lists of one pair of memory kinds, cleared and filled again for every window.
#[derive(Debug, Clone, Copy)]
struct Lists {
    local: XferDlistHandle,
    remote: XferDlistHandle,
}

/// One NIXL agent. It is used by one thread at a time (`&mut self`), and destroyed when dropped.
pub(crate) struct Direct {
    library: Arc<Library>,
    name: AgentName,
    agent: AgentHandle,
    backend: BackendHandle,
    with_backend: OptArgsHandle,
    notifications: NotifMapHandle,
    peers: HashMap<AgentName, CString>,
    lists: HashMap<(MemKind, MemKind), Lists>,
    /// What the registered regions lie in; given up only after the agent is gone.
    keep: Vec<Arc<dyn Any + Send + Sync>>,
    /// Nothing above is used any more.
    destroyed: bool,
}

impl fmt::Debug for Direct {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Direct")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

fn memory_type(kind: MemKind) -> MemoryType {
    match kind {
        MemKind::Dram => MemoryType::Dram,
        MemKind::Vram => MemoryType::Vram,
    }
}

fn address(value: u64, operation: &'static str) -> Result<usize, TransportError> {
    usize::try_from(value)
        .map_err(|_| refused(operation, format!("{value:#x} does not fit this machine")))
}

impl Direct {
    pub(super) fn open(
        library: Arc<Library>,
        name: &AgentName,
        config: &AgentConfig,
        plugin: &CStr,
        params: &[(CString, CString)],
    ) -> Result<Self, TransportError> {
        const OPERATION: &str = "open agent";
        let _pass = gate::enter().ok_or_else(|| exiting(OPERATION))?;
        let fail = |cause: CallError| error(OPERATION, &cause);
        let c_name = c_string("agent name", name.as_str()).map_err(fail)?;
        // SAFETY: the name is a C string and the configuration a plain value; the agent is new.
        let agent = unsafe { library.create_configured_agent(&c_name, config) }.map_err(fail)?;
        match Self::equip(&library, agent, plugin, params) {
            Ok((backend, with_backend, notifications)) => {
                gate::close_at_exit();
                Ok(Self {
                    library,
                    name: name.clone(),
                    agent,
                    backend,
                    with_backend,
                    notifications,
                    peers: HashMap::new(),
                    lists: HashMap::new(),
                    keep: Vec::new(),
                    destroyed: false,
                })
            }
            Err(cause) => {
                // SAFETY: the agent was just made and nothing else knows it.
                let _ = unsafe { library.destroy_agent(agent) };
                let mut error = error(OPERATION, &cause);
                error.cause = format!(
                    "{}; backend {} could not be set up, its reason is in NIXL's log on stderr \
                     (NIXL_LOG_LEVEL=INFO shows more)",
                    error.cause,
                    plugin.to_string_lossy()
                );
                Err(error)
            }
        }
    }

    fn equip(
        library: &Library,
        agent: AgentHandle,
        plugin: &CStr,
        params: &[(CString, CString)],
    ) -> Result<(BackendHandle, OptArgsHandle, NotifMapHandle), CallError> {
        // SAFETY: makes a value of its own.
        let list = unsafe { library.create_params() }?;
        let mut created = Ok(());
        for (key, value) in params {
            // SAFETY: the list is live and used by this thread alone; C copies both strings.
            created = created.and_then(|()| unsafe { library.params_add(list, key, value) });
        }
        let backend = created.and_then(|()| {
            // SAFETY: agent and list are live, and this thread alone uses them.
            unsafe { library.create_backend(agent, plugin, list) }
        });
        // SAFETY: the list is live, and the backend has copied what it needs.
        let _ = unsafe { library.destroy_params(list) };
        let backend = backend?;
        // SAFETY: makes a value of its own.
        let options = unsafe { library.create_opt_args() }?;
        // SAFETY: both handles are live and used by this thread alone.
        unsafe { library.opt_args_add_backend(options, backend) }?;
        // SAFETY: makes a value of its own.
        let notifications = unsafe { library.create_notif_map() }?;
        Ok((backend, options, notifications))
    }

    fn reg_list(&self, regions: &[&RegionGeometry]) -> Result<RegDlistHandle, TransportError> {
        const OPERATION: &str = "register";
        let fail = |cause: CallError| error(OPERATION, &cause);
        let kind = regions.first().map_or(MemKind::Dram, |region| region.mem);
        // SAFETY: makes a value of its own.
        let list = unsafe { self.library.create_reg_dlist(memory_type(kind)) }.map_err(fail)?;
        let filled = regions.iter().try_for_each(|region| {
            let len = region
                .byte_len()
                .map_err(|e| refused(OPERATION, e.to_string()))?;
            let (base, len) = (address(region.base, OPERATION)?, address(len, OPERATION)?);
            // SAFETY: the list is live and this thread's; the numbers are not dereferenced here.
            unsafe {
                self.library
                    .reg_dlist_add_desc(list, base, len, region.device.into(), &[])
            }
            .map_err(fail)
        });
        if let Err(error) = filled {
            // SAFETY: the list is live, and this is its only use from here on.
            let _ = unsafe { self.library.destroy_reg_dlist(list) };
            return Err(error);
        }
        Ok(list)
    }

    fn lists(&mut self, ends: Ends) -> Result<Lists, CallError> {
        let key = (ends.local_mem, ends.remote_mem);
        if let Some(lists) = self.lists.get(&key).copied() {
            // SAFETY: the lists are live and this thread's; NIXL copied them into earlier requests.
            unsafe { self.library.xfer_dlist_clear(lists.local) }?;
            // SAFETY: as above.
            unsafe { self.library.xfer_dlist_clear(lists.remote) }?;
            return Ok(lists);
        }
        // SAFETY: makes a value of its own.
        let local = unsafe { self.library.create_xfer_dlist(memory_type(ends.local_mem)) }?;
        // SAFETY: makes a value of its own.
        let remote = match unsafe { self.library.create_xfer_dlist(memory_type(ends.remote_mem)) } {
            Ok(remote) => remote,
            Err(cause) => {
                // SAFETY: the list is live and not used again.
                let _ = unsafe { self.library.destroy_xfer_dlist(local) };
                return Err(cause);
            }
        };
        let lists = Lists { local, remote };
        self.lists.insert(key, lists);
        Ok(lists)
    }

    /// Makes the request of a window; nothing is posted yet.
    fn request(
        &mut self,
        operation: XferOp,
        peer: &AgentName,
        ends: Ends,
        descriptors: &[Descriptor],
    ) -> Result<XferReqHandle, TransportError> {
        const OPERATION: &str = "prepare transfer";
        let fail = |cause: CallError| error(OPERATION, &cause);
        let lists = self.lists(ends).map_err(fail)?;
        for d in descriptors {
            let (local, remote) = (address(d.local, OPERATION)?, address(d.remote, OPERATION)?);
            let len = address(d.len, OPERATION)?;
            // A length that wraps passes NIXL's own checks.
            if local.checked_add(len).is_none() || remote.checked_add(len).is_none() {
                return Err(refused(OPERATION, format!("{d:?} wraps the address space")));
            }
            let (local_device, remote_device) = (ends.local_device, ends.remote_device);
            // SAFETY: the list is live and this thread's.
            unsafe {
                self.library
                    .xfer_dlist_add_desc(lists.local, local, len, local_device.into())
            }
            .map_err(fail)?;
            // SAFETY: the list is live and this thread's.
            unsafe {
                self.library
                    .xfer_dlist_add_desc(lists.remote, remote, len, remote_device.into())
            }
            .map_err(fail)?;
        }
        let Some(peer) = self.peers.get(peer) else {
            return Err(refused(OPERATION, format!("peer {peer} is not loaded")));
        };
        // SAFETY: all handles are live and this thread's. NIXL checks that every local range lies in
        // registered memory, which `keep` keeps mapped until after the agent is destroyed.
        unsafe {
            self.library.create_xfer_req(
                self.agent,
                operation,
                lists.local,
                lists.remote,
                peer,
                Some(self.with_backend),
            )
        }
        .map_err(fail)
    }

    /// Posts one window of writes.
    pub(super) fn post_write(
        &mut self,
        peer: &AgentName,
        ends: Ends,
        descriptors: &[Descriptor],
    ) -> Result<(DirectRequest, Progress), ReadFault> {
        self.post(XferOp::Write, peer, ends, descriptors)
    }

    fn post(
        &mut self,
        operation: XferOp,
        peer: &AgentName,
        ends: Ends,
        descriptors: &[Descriptor],
    ) -> Result<(DirectRequest, Progress), ReadFault> {
        let _pass = gate::enter().ok_or_else(|| ReadFault {
            error: exiting("post"),
            after: AfterError::Quiet,
        })?;
        let request = self
            .request(operation, peer, ends, descriptors)
            .map_err(|error| ReadFault {
                error,
                after: AfterError::Quiet,
            })?;
        // SAFETY: agent and request are live and this thread's. The destination stays mapped and
        // unused until the request is over or this agent is destroyed: the engine owns its blocks.
        // The source of a write lies in registered memory, which `keep` keeps mapped as long.
        match unsafe { self.library.post_xfer_req(self.agent, request, None) } {
            Ok(NixlProgress::Done) => Ok((DirectRequest(request), Progress::Done)),
            Ok(NixlProgress::InProgress) => Ok((DirectRequest(request), Progress::Pending)),
            Err(cause) => {
                // Some descriptors may have been posted before the one that failed.
                self.discard(DirectRequest(request));
                Err(ReadFault {
                    error: error("post", &cause),
                    after: AfterError::InDoubt,
                })
            }
        }
    }
}

impl Agent for Direct {
    type Request = DirectRequest;

    fn register(
        &mut self,
        regions: &[RegionGeometry],
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<(), TransportError> {
        let _pass = gate::enter().ok_or_else(|| exiting("register"))?;
        // Held from before the first registration, and also when one fails half way.
        self.keep.push(keep);
        let mut done: Vec<RegDlistHandle> = Vec::new();
        let mut result = Ok(());
        for kind in [MemKind::Dram, MemKind::Vram] {
            let of_kind: Vec<&RegionGeometry> =
                regions.iter().filter(|region| region.mem == kind).collect();
            if of_kind.is_empty() || result.is_err() {
                continue;
            }
            result = self.reg_list(&of_kind).and_then(|list| {
                // SAFETY: agent, list and options are live and this thread's. The memory is kept
                // mapped by `keep`, as the caller of `register` has it.
                let registered = unsafe {
                    self.library
                        .register_mem(self.agent, list, Some(self.with_backend))
                };
                match registered {
                    Ok(()) => {
                        done.push(list);
                        Ok(())
                    }
                    Err(cause) => {
                        // SAFETY: the list is live and not used again.
                        let _ = unsafe { self.library.destroy_reg_dlist(list) };
                        Err(error("register", &cause))
                    }
                }
            });
        }
        for list in done {
            if result.is_err() {
                // SAFETY: the list was registered just above with the same options.
                let _ = unsafe {
                    self.library
                        .deregister_mem(self.agent, list, Some(self.with_backend))
                };
            }
            // SAFETY: the list is live and not used again.
            let _ = unsafe { self.library.destroy_reg_dlist(list) };
        }
        result
    }

    fn metadata(&mut self) -> Result<Vec<u8>, TransportError> {
        let _pass = gate::enter().ok_or_else(|| exiting("get metadata"))?;
        // SAFETY: the agent is live and this thread's.
        let bytes = unsafe { self.library.get_local_md(self.agent) };
        bytes
            .map(|bytes| bytes.to_vec())
            .map_err(|cause| error("get metadata", &cause))
    }

    fn load_peer(&mut self, metadata: &[u8], expected: &AgentName) -> Result<(), TransportError> {
        const OPERATION: &str = "load peer";
        let _pass = gate::enter().ok_or_else(|| exiting(OPERATION))?;
        let name = c_string("agent name", expected.as_str()).map_err(|e| error(OPERATION, &e))?;
        // SAFETY: the agent is live and this thread's. That the blob is undamaged, which NIXL relies
        // on, is what the caller has verified by its checksum.
        let found = unsafe { self.library.load_remote_md(self.agent, metadata) }
            .map_err(|cause| error(OPERATION, &cause))?;
        if found != name {
            // SAFETY: the agent is live and this thread's.
            let _ = unsafe { self.library.invalidate_remote_md(self.agent, &found) };
            let found = found.to_string_lossy();
            return Err(refused(
                OPERATION,
                format!("the metadata is of agent {found}, the card promised {expected}"),
            ));
        }
        self.peers.insert(expected.clone(), name);
        Ok(())
    }

    fn reach(
        &mut self,
        peer: &AgentName,
        probe: Descriptor,
        limit: Duration,
    ) -> Result<(), TransportError> {
        let begin = Instant::now();
        let (mut request, mut progress) = self
            .post_read(peer, Ends::HOST, &[probe])
            .map_err(|fault| fault.error)?;
        while progress == Progress::Pending {
            let waited = begin.elapsed();
            if waited >= limit {
                self.discard(request);
                return Err(TransportError {
                    operation: "reach peer",
                    kind: FailureKind::PeerLost,
                    cause: format!("{peer} did not answer within {limit:?}"),
                    raw: None,
                });
            }
            // The other end has a processor to find, too: without a pause it takes longer.
            std::thread::sleep(REACH_NAP);
            progress = self.poll(&mut request).map_err(|fault| fault.error)?;
        }
        self.discard(request);
        Ok(())
    }

    fn forget_peer(&mut self, peer: &AgentName) {
        let Some(_pass) = gate::enter() else { return };
        if let Some(name) = self.peers.remove(peer) {
            // SAFETY: the agent is live and this thread's. Refused when NIXL forgot it by itself.
            let _ = unsafe { self.library.invalidate_remote_md(self.agent, &name) };
        }
    }

    fn post_read(
        &mut self,
        peer: &AgentName,
        ends: Ends,
        descriptors: &[Descriptor],
    ) -> Result<(DirectRequest, Progress), ReadFault> {
        self.post(XferOp::Read, peer, ends, descriptors)
    }

    fn poll(&mut self, request: &mut DirectRequest) -> Result<Progress, ReadFault> {
        let _pass = gate::enter().ok_or_else(|| ReadFault {
            error: exiting("read"),
            after: AfterError::InDoubt,
        })?;
        // SAFETY: agent and request are live and this thread's.
        match unsafe { self.library.xfer_status_detailed(self.agent, request.0) } {
            Ok(NixlProgress::Done) => Ok(Progress::Done),
            Ok(NixlProgress::InProgress) => Ok(Progress::Pending),
            // One descriptor's failure is reported while others may be in flight.
            Err(cause) => Err(ReadFault {
                error: error("read", &cause),
                after: AfterError::InDoubt,
            }),
        }
    }

    fn discard(&mut self, request: DirectRequest) {
        let Some(_pass) = gate::enter() else { return };
        // SAFETY: agent and request are live and this thread's; the request is not used again.
        let released = unsafe { self.library.release_xfer_req(self.agent, request.0) };
        if let Err(cause) = released {
            tracing::debug!(agent = %self.name, %cause, "a request was not released");
        }
        // SAFETY: the request is not used again.
        let _ = unsafe { self.library.destroy_xfer_req(request.0) };
    }

    fn notify(&mut self, peer: &AgentName, message: &[u8]) -> Result<(), TransportError> {
        let _pass = gate::enter().ok_or_else(|| exiting("notify"))?;
        let Some(peer) = self.peers.get(peer) else {
            return Err(refused("notify", format!("peer {peer} is not loaded")));
        };
        // SAFETY: agent and options are live and this thread's; C copies the message.
        unsafe {
            self.library
                .gen_notif(self.agent, peer, message, Some(self.with_backend))
        }
        .map(|_| ())
        .map_err(|cause| error("notify", &cause))
    }

    fn notifications(
        &mut self,
        into: &mut Vec<(AgentName, Vec<u8>)>,
    ) -> Result<(), TransportError> {
        let _pass = gate::enter().ok_or_else(|| exiting("take notifications"))?;
        let fail = |cause: CallError| error("take notifications", &cause);
        let map = self.notifications;
        // SAFETY: agent, map and options are live and this thread's.
        unsafe {
            self.library
                .get_notifs(self.agent, map, Some(self.with_backend))
        }
        .map_err(fail)?;
        // SAFETY: the map is live and this thread's.
        let senders = unsafe { self.library.notif_map_size(map) }.map_err(fail)?;
        let mut result = Ok(());
        for index in 0..senders {
            // A sender's name is its own choice: one that cannot be looked up (it has a NUL inside,
            // say) must not keep the others from being heard.
            if let Err(cause) = self.take_from(index, into) {
                result = Err(fail(cause));
            }
        }
        if senders > 0 {
            // Also after a failure, or the same messages would be taken again and again.
            // SAFETY: as above.
            unsafe { self.library.notif_map_clear(map) }.map_err(fail)?;
        }
        result
    }

    fn destroy(mut self) -> Result<(), TransportError> {
        self.tear_down()
    }
}

impl Direct {
    /// Takes what the sender at `index` of the map has sent.
    fn take_from(
        &self,
        index: usize,
        into: &mut Vec<(AgentName, Vec<u8>)>,
    ) -> Result<(), CallError> {
        let map = self.notifications;
        // SAFETY: the map is live and this thread's.
        let sender = unsafe { self.library.notif_map_get_agent_at(map, index) }?;
        // SAFETY: as above.
        let count = unsafe { self.library.notif_map_get_notifs_size(map, &sender) }?;
        let Ok(name) = AgentName::new(sender.to_string_lossy()) else {
            return Ok(());
        };
        for n in 0..count {
            // SAFETY: as above.
            let message = unsafe { self.library.notif_map_get_notif(map, &sender, n) }?;
            into.push((name.clone(), message));
        }
        Ok(())
    }

    /// Destroys everything, once.
    fn tear_down(&mut self) -> Result<(), TransportError> {
        if std::mem::replace(&mut self.destroyed, true) {
            return Ok(());
        }
        let Some(_pass) = gate::enter() else {
            // Nothing can be destroyed any more; the process's end does it.
            std::mem::forget(std::mem::take(&mut self.keep));
            return Err(exiting("destroy agent"));
        };
        for lists in self.lists.values() {
            // SAFETY: the list is live and not used again.
            let _ = unsafe { self.library.destroy_xfer_dlist(lists.local) };
            // SAFETY: as above.
            let _ = unsafe { self.library.destroy_xfer_dlist(lists.remote) };
        }
        // SAFETY: the map is live and not used again.
        let _ = unsafe { self.library.destroy_notif_map(self.notifications) };
        // SAFETY: the options are live and not used again.
        let _ = unsafe { self.library.destroy_opt_args(self.with_backend) };
        // The fence: it takes its backend, its registrations and its posted reads with it.
        // SAFETY: the agent is live and not used again; the backend handle is not used either.
        let destroyed = unsafe { self.library.destroy_agent(self.agent) };
        let _ = self.backend;
        destroyed.map_err(|cause| {
            // Nothing says that its writes have stopped: its memory must never be unmapped.
            std::mem::forget(std::mem::take(&mut self.keep));
            error("destroy agent", &cause)
        })
    }
}

impl Drop for Direct {
    fn drop(&mut self) {
        if let Err(error) = self.tear_down() {
            tracing::error!(agent = %self.name, %error, "an agent could not be destroyed");
        }
    }
}
