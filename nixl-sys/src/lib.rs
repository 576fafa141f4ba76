#![doc = include_str!("../README.md")]

mod api;
#[allow(
    missing_docs,
    non_camel_case_types,
    dead_code,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    clippy::expect_used
)]
mod bindings;
mod disconnect;
mod discovery;
mod environment;
mod error;
mod libfabric;
mod library;
mod probe;
mod process;
mod report;
mod status;
mod symbols;
mod types;
mod ucx;

pub use discovery::{LIBRARY_NAME, Layout, find_in};
pub use environment::{
    Environment, EnvironmentOutcome, EnvironmentReport, KeptVariable, Variable, has_rdma,
};
pub use error::{CallError, LoadError, c_string};
pub use libfabric::{
    LIBFABRIC_NAME, LibfabricReport, Nic, Provider, Version, fabric_symbols, libfabric,
};
pub use library::{Library, OpenOptions};
pub use probe::{ProbeError, plugin_loads, preload};
pub use report::{Finding, LoadReport, VersionFamily};
pub use status::{Progress, Status};
pub use symbols::{FUNCTIONS_SINCE_1_5, REQUIRED_FUNCTIONS};
pub use types::{
    AgentConfig, AgentHandle, BackendHandle, Buffer, CostEstimate, MemListHandle, MemViewHandle,
    MemoryType, NotifMapHandle, OptArgsHandle, ParamIterHandle, ParamsHandle, PreparedDlistHandle,
    QueryRespListHandle, RegDlistHandle, RemoteDlistHandle, StringListHandle, ThreadSync,
    XferDlistHandle, XferOp, XferReqHandle, XferTelemetry,
};
pub use ucx::{UcxReport, UcxResource, ucx, ucx_library};
