//! Handles and plain values of the interface.

use std::ffi::c_void;
use std::ops::Deref;
use std::ptr::NonNull;

use crate::bindings as c;

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident = $raw:ident;)*) => {$(
        $(#[$doc])*
        ///
        /// A copyable address that owns nothing: whoever made it says when it is destroyed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(transparent)]
        pub struct $name(NonNull<c::$raw>);

        impl $name {
            pub(crate) fn new(raw: *mut c::$raw) -> Option<Self> {
                NonNull::new(raw).map(Self)
            }

            pub(crate) fn raw(self) -> *mut c::$raw {
                self.0.as_ptr()
            }

            /// The address, for logs and for code that calls NIXL by other ways.
            pub fn as_ptr(self) -> *mut c_void {
                self.0.as_ptr().cast()
            }
        }

        // SAFETY: the handle is an address. Nothing is read through it but by unsafe functions, whose callers see to
        // it that NIXL allows the call from that thread.
        unsafe impl Send for $name {}

        // SAFETY: as above: a shared handle can only be copied.
        unsafe impl Sync for $name {}
    )*};
}

handles! {
    /// An agent.
    AgentHandle = nixl_capi_agent_s;
    /// A backend of an agent.
    BackendHandle = nixl_capi_backend_s;
    /// A list of memory types.
    MemListHandle = nixl_capi_mem_list_s;
    /// A prepared memory view.
    MemViewHandle = nixl_capi_mem_view_s;
    /// Received notifications by sender.
    NotifMapHandle = nixl_capi_notif_map_s;
    /// Optional arguments.
    OptArgsHandle = nixl_capi_opt_args_s;
    /// A walk over parameters.
    ParamIterHandle = nixl_capi_param_iter_s;
    /// Parameters: strings by name.
    ParamsHandle = nixl_capi_params_s;
    /// Answers of a memory query.
    QueryRespListHandle = nixl_capi_query_resp_list_s;
    /// A list of descriptors to register.
    RegDlistHandle = nixl_capi_reg_dlist_s;
    /// A list of descriptors of several peers.
    RemoteDlistHandle = nixl_capi_remote_dlist_s;
    /// A list of strings.
    StringListHandle = nixl_capi_string_list_s;
    /// A list of descriptors to transfer.
    XferDlistHandle = nixl_capi_xfer_dlist_s;
    /// A prepared list of descriptors to transfer.
    PreparedDlistHandle = nixl_capi_xfer_dlist_handle_s;
    /// A transfer request.
    XferReqHandle = nixl_capi_xfer_req_s;
}

/// Kinds of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryType {
    /// Host memory.
    Dram,
    /// GPU memory.
    Vram,
    /// A block device.
    Block,
    /// An object store.
    Object,
    /// A file.
    File,
    /// What NIXL, or this crate, has no name for.
    Unknown,
}

impl MemoryType {
    pub(crate) fn to_raw(self) -> c::nixl_capi_mem_type_t {
        match self {
            Self::Dram => c::NIXL_CAPI_MEM_DRAM,
            Self::Vram => c::NIXL_CAPI_MEM_VRAM,
            Self::Block => c::NIXL_CAPI_MEM_BLOCK,
            Self::Object => c::NIXL_CAPI_MEM_OBJECT,
            Self::File => c::NIXL_CAPI_MEM_FILE,
            Self::Unknown => c::NIXL_CAPI_MEM_UNKNOWN,
        }
    }

    pub(crate) fn from_raw(raw: c::nixl_capi_mem_type_t) -> Self {
        match raw {
            c::NIXL_CAPI_MEM_DRAM => Self::Dram,
            c::NIXL_CAPI_MEM_VRAM => Self::Vram,
            c::NIXL_CAPI_MEM_BLOCK => Self::Block,
            c::NIXL_CAPI_MEM_OBJECT => Self::Object,
            c::NIXL_CAPI_MEM_FILE => Self::File,
            _ => Self::Unknown,
        }
    }
}

/// Direction of a transfer, seen from the agent that posts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum XferOp {
    /// From the peer to here.
    Read,
    /// From here to the peer.
    Write,
}

impl XferOp {
    pub(crate) fn to_raw(self) -> c::nixl_capi_xfer_op_t {
        match self {
            Self::Read => c::NIXL_CAPI_XFER_OP_READ,
            Self::Write => c::NIXL_CAPI_XFER_OP_WRITE,
        }
    }
}

/// How an agent guards itself against several threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ThreadSync {
    /// Not at all: two threads in one agent at a time crash the process.
    #[default]
    None,
    /// One lock around every call, also around a post that copies inside the call.
    Strict,
    /// A read-write lock: posts and status calls run side by side.
    ReadWrite,
}

/// How an agent is made. The default is NIXL's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentConfig {
    /// Whether a thread of the agent's own drives transfers.
    pub progress_thread: bool,
    /// Whether the agent listens for metadata over TCP.
    pub listen_thread: bool,
    /// Where it listens.
    pub listen_port: u16,
    /// How it guards itself against several threads.
    pub thread_sync: ThreadSync,
    /// Read by neither NIXL 1.4 nor 1.5; the backend parameter `num_workers` is.
    pub num_workers: u32,
    /// Pause of the progress thread in microseconds. 0 burns a core.
    pub progress_delay_us: u64,
    /// Pause of the listening thread in microseconds.
    pub listen_delay_us: u64,
    /// Whether requests can be asked for [`XferTelemetry`].
    pub capture_telemetry: bool,
}

impl Default for AgentConfig {
    fn default() -> Self {
        Self {
            progress_thread: false,
            listen_thread: false,
            listen_port: 0,
            thread_sync: ThreadSync::None,
            num_workers: 1,
            progress_delay_us: 0,
            listen_delay_us: 100_000,
            capture_telemetry: false,
        }
    }
}

impl AgentConfig {
    pub(crate) fn to_raw(&self) -> c::nixl_capi_agent_config_t {
        c::nixl_capi_agent_config_t {
            enable_prog_thread: self.progress_thread,
            enable_listen_thread: self.listen_thread,
            listen_port: self.listen_port.into(),
            thread_sync: match self.thread_sync {
                ThreadSync::None => c::NIXL_CAPI_THREAD_SYNC_NONE,
                ThreadSync::Strict => c::NIXL_CAPI_THREAD_SYNC_STRICT,
                ThreadSync::ReadWrite => c::NIXL_CAPI_THREAD_SYNC_RW,
            },
            num_workers: self.num_workers,
            pthr_delay_us: self.progress_delay_us,
            lthr_delay_us: self.listen_delay_us,
            capture_telemetry: self.capture_telemetry,
        }
    }
}

/// What NIXL measured of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XferTelemetry {
    /// When it was posted, in microseconds of the steady clock.
    pub started_us: u64,
    /// How long the post took.
    pub post_us: u64,
    /// How long until its end was seen; depends on when the status was asked.
    pub transfer_us: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Descriptors after merging.
    pub descriptors: u64,
}

/// What a backend expects a request to cost.
///
/// LIBFABRIC answers success with numbers that mean nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CostEstimate {
    /// Expected duration.
    pub duration_us: i64,
    /// How far off that may be.
    pub error_margin_us: i64,
    /// How it was found; 0 is the backend's own formula.
    pub method: u32,
}

/// Bytes that NIXL allocated; freed on drop.
#[derive(Debug)]
pub struct Buffer {
    data: NonNull<u8>,
    len: usize,
}

impl Buffer {
    /// Takes what a call left behind; null is the empty buffer.
    ///
    /// # Safety
    ///
    /// `data` is null or the start of `len` initialised bytes from `malloc` that nothing else owns.
    pub(crate) unsafe fn from_malloc(data: *mut c_void, len: usize) -> Option<Self> {
        NonNull::new(data.cast::<u8>()).map(|data| Self { data, len })
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `from_malloc` was promised `len` initialised bytes at `data`, and `self` owns them.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: `data` came from malloc, is owned, and this is the only place that frees it.
        unsafe { libc::free(self.data.as_ptr().cast()) }
    }
}

// SAFETY: the bytes are owned by this value alone, like those of a `Vec`.
unsafe impl Send for Buffer {}

// SAFETY: a shared `Buffer` only gives out shared slices.
unsafe impl Sync for Buffer {}
