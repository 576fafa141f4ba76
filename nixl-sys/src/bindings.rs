// Generated from include/nixl_capi.h by scripts/regenerate-bindings.sh; not edited by hand.

pub const NIXL_CAPI_IN_PROG: nixl_capi_status_t = 1;
pub const NIXL_CAPI_SUCCESS: nixl_capi_status_t = 0;
pub const NIXL_CAPI_ERROR_INVALID_PARAM: nixl_capi_status_t = -1;
pub const NIXL_CAPI_ERROR_BACKEND: nixl_capi_status_t = -2;
pub const NIXL_CAPI_ERROR_INVALID_STATE: nixl_capi_status_t = -3;
pub const NIXL_CAPI_ERROR_EXCEPTION: nixl_capi_status_t = -4;
pub const NIXL_CAPI_ERROR_NO_TELEMETRY: nixl_capi_status_t = -5;
pub const NIXL_CAPI_ERROR_NOT_FOUND: nixl_capi_status_t = -6;
pub type nixl_capi_status_t = ::core::ffi::c_int;
pub const NIXL_CAPI_MEM_DRAM: nixl_capi_mem_type_t = 0;
pub const NIXL_CAPI_MEM_VRAM: nixl_capi_mem_type_t = 1;
pub const NIXL_CAPI_MEM_BLOCK: nixl_capi_mem_type_t = 2;
pub const NIXL_CAPI_MEM_OBJECT: nixl_capi_mem_type_t = 3;
pub const NIXL_CAPI_MEM_FILE: nixl_capi_mem_type_t = 4;
pub const NIXL_CAPI_MEM_UNKNOWN: nixl_capi_mem_type_t = 5;
pub type nixl_capi_mem_type_t = ::core::ffi::c_uint;
pub const NIXL_CAPI_THREAD_SYNC_NONE: nixl_capi_thread_sync_t = 0;
pub const NIXL_CAPI_THREAD_SYNC_STRICT: nixl_capi_thread_sync_t = 1;
pub const NIXL_CAPI_THREAD_SYNC_RW: nixl_capi_thread_sync_t = 2;
pub type nixl_capi_thread_sync_t = ::core::ffi::c_uint;
pub const NIXL_CAPI_XFER_OP_READ: nixl_capi_xfer_op_t = 0;
pub const NIXL_CAPI_XFER_OP_WRITE: nixl_capi_xfer_op_t = 1;
pub type nixl_capi_xfer_op_t = ::core::ffi::c_uint;
pub const NIXL_CAPI_COST_ANALYTICAL_BACKEND: nixl_capi_cost_t = 0;
pub type nixl_capi_cost_t = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct nixl_capi_agent_config_s {
    pub enable_prog_thread: bool,
    pub enable_listen_thread: bool,
    pub listen_port: ::core::ffi::c_int,
    pub thread_sync: nixl_capi_thread_sync_t,
    pub num_workers: ::core::ffi::c_uint,
    pub pthr_delay_us: u64,
    pub lthr_delay_us: u64,
    pub capture_telemetry: bool,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of nixl_capi_agent_config_s"]
        [::core::mem::size_of::<nixl_capi_agent_config_s>() - 40usize];
    ["Alignment of nixl_capi_agent_config_s"]
        [::core::mem::align_of::<nixl_capi_agent_config_s>() - 8usize];
    ["Offset of field: nixl_capi_agent_config_s::enable_prog_thread"]
        [::core::mem::offset_of!(nixl_capi_agent_config_s, enable_prog_thread) - 0usize];
    ["Offset of field: nixl_capi_agent_config_s::enable_listen_thread"]
        [::core::mem::offset_of!(nixl_capi_agent_config_s, enable_listen_thread) - 1usize];
    ["Offset of field: nixl_capi_agent_config_s::listen_port"]
        [::core::mem::offset_of!(nixl_capi_agent_config_s, listen_port) - 4usize];
    ["Offset of field: nixl_capi_agent_config_s::thread_sync"]
        [::core::mem::offset_of!(nixl_capi_agent_config_s, thread_sync) - 8usize];
    ["Offset of field: nixl_capi_agent_config_s::num_workers"]
        [::core::mem::offset_of!(nixl_capi_agent_config_s, num_workers) - 12usize];
    ["Offset of field: nixl_capi_agent_config_s::pthr_delay_us"]
        [::core::mem::offset_of!(nixl_capi_agent_config_s, pthr_delay_us) - 16usize];
    ["Offset of field: nixl_capi_agent_config_s::lthr_delay_us"]
        [::core::mem::offset_of!(nixl_capi_agent_config_s, lthr_delay_us) - 24usize];
    ["Offset of field: nixl_capi_agent_config_s::capture_telemetry"]
        [::core::mem::offset_of!(nixl_capi_agent_config_s, capture_telemetry) - 32usize];
};
pub type nixl_capi_agent_config_t = nixl_capi_agent_config_s;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct nixl_capi_xfer_telemetry_s {
    pub start_time_us: u64,
    pub post_duration_us: u64,
    pub xfer_duration_us: u64,
    pub total_bytes: u64,
    pub desc_count: u64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of nixl_capi_xfer_telemetry_s"]
        [::core::mem::size_of::<nixl_capi_xfer_telemetry_s>() - 40usize];
    ["Alignment of nixl_capi_xfer_telemetry_s"]
        [::core::mem::align_of::<nixl_capi_xfer_telemetry_s>() - 8usize];
    ["Offset of field: nixl_capi_xfer_telemetry_s::start_time_us"]
        [::core::mem::offset_of!(nixl_capi_xfer_telemetry_s, start_time_us) - 0usize];
    ["Offset of field: nixl_capi_xfer_telemetry_s::post_duration_us"]
        [::core::mem::offset_of!(nixl_capi_xfer_telemetry_s, post_duration_us) - 8usize];
    ["Offset of field: nixl_capi_xfer_telemetry_s::xfer_duration_us"]
        [::core::mem::offset_of!(nixl_capi_xfer_telemetry_s, xfer_duration_us) - 16usize];
    ["Offset of field: nixl_capi_xfer_telemetry_s::total_bytes"]
        [::core::mem::offset_of!(nixl_capi_xfer_telemetry_s, total_bytes) - 24usize];
    ["Offset of field: nixl_capi_xfer_telemetry_s::desc_count"]
        [::core::mem::offset_of!(nixl_capi_xfer_telemetry_s, desc_count) - 32usize];
};
pub type nixl_capi_xfer_telemetry_t = *mut nixl_capi_xfer_telemetry_s;
#[repr(C)]
#[derive(Debug)]
pub struct nixl_capi_agent_s {
    _unused: [u8; 0],
}
pub type nixl_capi_agent_t = *mut nixl_capi_agent_s;
#[repr(C)]
#[derive(Debug)]
pub struct nixl_capi_backend_s {
    _unused: [u8; 0],
}
pub type nixl_capi_backend_t = *mut nixl_capi_backend_s;
#[repr(C)]
#[derive(Debug)]
pub struct nixl_capi_mem_list_s {
    _unused: [u8; 0],
}
pub type nixl_capi_mem_list_t = *mut nixl_capi_mem_list_s;
#[repr(C)]
#[derive(Debug)]
pub struct nixl_capi_mem_view_s {
    _unused: [u8; 0],
}
pub type nixl_capi_mem_view_t = *mut nixl_capi_mem_view_s;
#[repr(C)]
#[derive(Debug)]
pub struct nixl_capi_notif_map_s {
    _unused: [u8; 0],
}
pub type nixl_capi_notif_map_t = *mut nixl_capi_notif_map_s;
#[repr(C)]
#[derive(Debug)]
pub struct nixl_capi_opt_args_s {
    _unused: [u8; 0],
}
pub type nixl_capi_opt_args_t = *mut nixl_capi_opt_args_s;
#[repr(C)]
#[derive(Debug)]
pub struct nixl_capi_param_iter_s {
    _unused: [u8; 0],
}
pub type nixl_capi_param_iter_t = *mut nixl_capi_param_iter_s;
#[repr(C)]
#[derive(Debug)]
pub struct nixl_capi_params_s {
    _unused: [u8; 0],
}
pub type nixl_capi_params_t = *mut nixl_capi_params_s;
#[repr(C)]
#[derive(Debug)]
pub struct nixl_capi_query_resp_list_s {
    _unused: [u8; 0],
}
pub type nixl_capi_query_resp_list_t = *mut nixl_capi_query_resp_list_s;
#[repr(C)]
#[derive(Debug)]
pub struct nixl_capi_reg_dlist_s {
    _unused: [u8; 0],
}
pub type nixl_capi_reg_dlist_t = *mut nixl_capi_reg_dlist_s;
#[repr(C)]
#[derive(Debug)]
pub struct nixl_capi_remote_dlist_s {
    _unused: [u8; 0],
}
pub type nixl_capi_remote_dlist_t = *mut nixl_capi_remote_dlist_s;
#[repr(C)]
#[derive(Debug)]
pub struct nixl_capi_string_list_s {
    _unused: [u8; 0],
}
pub type nixl_capi_string_list_t = *mut nixl_capi_string_list_s;
#[repr(C)]
#[derive(Debug)]
pub struct nixl_capi_xfer_dlist_handle_s {
    _unused: [u8; 0],
}
pub type nixl_capi_xfer_dlist_handle_t = *mut nixl_capi_xfer_dlist_handle_s;
#[repr(C)]
#[derive(Debug)]
pub struct nixl_capi_xfer_dlist_s {
    _unused: [u8; 0],
}
pub type nixl_capi_xfer_dlist_t = *mut nixl_capi_xfer_dlist_s;
#[repr(C)]
#[derive(Debug)]
pub struct nixl_capi_xfer_req_s {
    _unused: [u8; 0],
}
pub type nixl_capi_xfer_req_t = *mut nixl_capi_xfer_req_s;
pub struct NixlCapi {
    __library: ::libloading::Library,
    pub nixl_capi_is_stub: Result<unsafe extern "C" fn() -> bool, ::libloading::Error>,
    pub nixl_capi_create_agent: Result<
        unsafe extern "C" fn(
            name: *const ::core::ffi::c_char,
            agent: *mut nixl_capi_agent_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_create_configured_agent: Result<
        unsafe extern "C" fn(
            name: *const ::core::ffi::c_char,
            config: *const nixl_capi_agent_config_t,
            agent: *mut nixl_capi_agent_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_destroy_agent: Result<
        unsafe extern "C" fn(agent: nixl_capi_agent_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_get_local_md: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            data: *mut *mut ::core::ffi::c_void,
            len: *mut usize,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_get_local_partial_md: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            descs: nixl_capi_reg_dlist_t,
            data: *mut *mut ::core::ffi::c_void,
            len: *mut usize,
            opt_args: nixl_capi_opt_args_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_load_remote_md: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            data: *const ::core::ffi::c_void,
            len: usize,
            agent_name: *mut *mut ::core::ffi::c_char,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_invalidate_remote_md: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            remote_agent: *const ::core::ffi::c_char,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_check_remote_md: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            remote_agent: *const ::core::ffi::c_char,
            descs: nixl_capi_xfer_dlist_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_send_local_md: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            opt_args: nixl_capi_opt_args_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_send_local_partial_md: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            descs: nixl_capi_reg_dlist_t,
            opt_args: nixl_capi_opt_args_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_fetch_remote_md: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            remote_agent: *const ::core::ffi::c_char,
            opt_args: nixl_capi_opt_args_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_invalidate_local_md: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            opt_args: nixl_capi_opt_args_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_agent_make_connection: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            remote_agent: *const ::core::ffi::c_char,
            opt_args: nixl_capi_opt_args_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_get_available_plugins: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            plugins: *mut nixl_capi_string_list_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_get_plugin_params: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            plugin_name: *const ::core::ffi::c_char,
            mems: *mut nixl_capi_mem_list_t,
            params: *mut nixl_capi_params_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_create_backend: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            plugin_name: *const ::core::ffi::c_char,
            params: nixl_capi_params_t,
            backend: *mut nixl_capi_backend_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_get_backend_params: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            backend: nixl_capi_backend_t,
            mems: *mut nixl_capi_mem_list_t,
            params: *mut nixl_capi_params_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_destroy_backend: Result<
        unsafe extern "C" fn(backend: nixl_capi_backend_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_string_list_size: Result<
        unsafe extern "C" fn(list: nixl_capi_string_list_t, size: *mut usize) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_string_list_get: Result<
        unsafe extern "C" fn(
            list: nixl_capi_string_list_t,
            index: usize,
            str_: *mut *const ::core::ffi::c_char,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_destroy_string_list: Result<
        unsafe extern "C" fn(list: nixl_capi_string_list_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_mem_list_is_empty: Result<
        unsafe extern "C" fn(list: nixl_capi_mem_list_t, is_empty: *mut bool) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_mem_list_size: Result<
        unsafe extern "C" fn(list: nixl_capi_mem_list_t, size: *mut usize) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_mem_list_get: Result<
        unsafe extern "C" fn(
            list: nixl_capi_mem_list_t,
            index: usize,
            mem_type: *mut nixl_capi_mem_type_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_mem_type_to_string: Result<
        unsafe extern "C" fn(
            mem_type: nixl_capi_mem_type_t,
            str_: *mut *const ::core::ffi::c_char,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_destroy_mem_list: Result<
        unsafe extern "C" fn(list: nixl_capi_mem_list_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_create_params: Result<
        unsafe extern "C" fn(params: *mut nixl_capi_params_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_params_add: Result<
        unsafe extern "C" fn(
            params: nixl_capi_params_t,
            key: *const ::core::ffi::c_char,
            value: *const ::core::ffi::c_char,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_params_is_empty: Result<
        unsafe extern "C" fn(params: nixl_capi_params_t, is_empty: *mut bool) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_params_create_iterator: Result<
        unsafe extern "C" fn(
            params: nixl_capi_params_t,
            iter: *mut nixl_capi_param_iter_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_params_iterator_next: Result<
        unsafe extern "C" fn(
            iter: nixl_capi_param_iter_t,
            key: *mut *const ::core::ffi::c_char,
            value: *mut *const ::core::ffi::c_char,
            has_next: *mut bool,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_params_destroy_iterator: Result<
        unsafe extern "C" fn(iter: nixl_capi_param_iter_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_destroy_params: Result<
        unsafe extern "C" fn(params: nixl_capi_params_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_create_opt_args: Result<
        unsafe extern "C" fn(args: *mut nixl_capi_opt_args_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_destroy_opt_args: Result<
        unsafe extern "C" fn(args: nixl_capi_opt_args_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_opt_args_add_backend: Result<
        unsafe extern "C" fn(
            args: nixl_capi_opt_args_t,
            backend: nixl_capi_backend_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_opt_args_set_notif_msg: Result<
        unsafe extern "C" fn(
            args: nixl_capi_opt_args_t,
            data: *const ::core::ffi::c_void,
            len: usize,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_opt_args_get_notif_msg: Result<
        unsafe extern "C" fn(
            args: nixl_capi_opt_args_t,
            data: *mut *mut ::core::ffi::c_void,
            len: *mut usize,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_opt_args_set_has_notif: Result<
        unsafe extern "C" fn(args: nixl_capi_opt_args_t, has_notif: bool) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_opt_args_get_has_notif: Result<
        unsafe extern "C" fn(
            args: nixl_capi_opt_args_t,
            has_notif: *mut bool,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_opt_args_set_skip_desc_merge: Result<
        unsafe extern "C" fn(args: nixl_capi_opt_args_t, skip_merge: bool) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_opt_args_get_skip_desc_merge: Result<
        unsafe extern "C" fn(
            args: nixl_capi_opt_args_t,
            skip_merge: *mut bool,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_opt_args_set_ip_addr: Result<
        unsafe extern "C" fn(
            args: nixl_capi_opt_args_t,
            ip_addr: *const ::core::ffi::c_char,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_opt_args_set_port: Result<
        unsafe extern "C" fn(args: nixl_capi_opt_args_t, port: u16) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_opt_args_set_custom_param: Result<
        unsafe extern "C" fn(
            args: nixl_capi_opt_args_t,
            data: *const ::core::ffi::c_void,
            len: usize,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_opt_args_get_custom_param: Result<
        unsafe extern "C" fn(
            args: nixl_capi_opt_args_t,
            data: *mut *mut ::core::ffi::c_void,
            len: *mut usize,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_create_xfer_dlist: Result<
        unsafe extern "C" fn(
            mem_type: nixl_capi_mem_type_t,
            dlist: *mut nixl_capi_xfer_dlist_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_destroy_xfer_dlist: Result<
        unsafe extern "C" fn(dlist: nixl_capi_xfer_dlist_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_xfer_dlist_get_type: Result<
        unsafe extern "C" fn(
            dlist: nixl_capi_xfer_dlist_t,
            mem_type: *mut nixl_capi_mem_type_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_xfer_dlist_add_desc: Result<
        unsafe extern "C" fn(
            dlist: nixl_capi_xfer_dlist_t,
            addr: usize,
            len: usize,
            dev_id: u64,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_xfer_dlist_desc_count: Result<
        unsafe extern "C" fn(
            dlist: nixl_capi_xfer_dlist_t,
            count: *mut usize,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_xfer_dlist_len: Result<
        unsafe extern "C" fn(dlist: nixl_capi_xfer_dlist_t, len: *mut usize) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_xfer_dlist_is_empty: Result<
        unsafe extern "C" fn(
            dlist: nixl_capi_xfer_dlist_t,
            is_empty: *mut bool,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_xfer_dlist_trim: Result<
        unsafe extern "C" fn(dlist: nixl_capi_xfer_dlist_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_xfer_dlist_rem_desc: Result<
        unsafe extern "C" fn(
            dlist: nixl_capi_xfer_dlist_t,
            index: ::core::ffi::c_int,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_xfer_dlist_clear: Result<
        unsafe extern "C" fn(dlist: nixl_capi_xfer_dlist_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_xfer_dlist_resize: Result<
        unsafe extern "C" fn(dlist: nixl_capi_xfer_dlist_t, new_size: usize) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_xfer_dlist_print: Result<
        unsafe extern "C" fn(dlist: nixl_capi_xfer_dlist_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_create_reg_dlist: Result<
        unsafe extern "C" fn(
            mem_type: nixl_capi_mem_type_t,
            dlist: *mut nixl_capi_reg_dlist_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_destroy_reg_dlist: Result<
        unsafe extern "C" fn(dlist: nixl_capi_reg_dlist_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_reg_dlist_get_type: Result<
        unsafe extern "C" fn(
            dlist: nixl_capi_reg_dlist_t,
            mem_type: *mut nixl_capi_mem_type_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_reg_dlist_add_desc: Result<
        unsafe extern "C" fn(
            dlist: nixl_capi_reg_dlist_t,
            addr: usize,
            len: usize,
            dev_id: u64,
            metadata: *const ::core::ffi::c_void,
            metadata_len: usize,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_reg_dlist_desc_count: Result<
        unsafe extern "C" fn(dlist: nixl_capi_reg_dlist_t, count: *mut usize) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_reg_dlist_is_empty: Result<
        unsafe extern "C" fn(
            dlist: nixl_capi_reg_dlist_t,
            is_empty: *mut bool,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_reg_dlist_trim: Result<
        unsafe extern "C" fn(dlist: nixl_capi_reg_dlist_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_reg_dlist_rem_desc: Result<
        unsafe extern "C" fn(
            dlist: nixl_capi_reg_dlist_t,
            index: ::core::ffi::c_int,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_reg_dlist_clear: Result<
        unsafe extern "C" fn(dlist: nixl_capi_reg_dlist_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_reg_dlist_resize: Result<
        unsafe extern "C" fn(dlist: nixl_capi_reg_dlist_t, new_size: usize) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_reg_dlist_print: Result<
        unsafe extern "C" fn(dlist: nixl_capi_reg_dlist_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_create_remote_dlist: Result<
        unsafe extern "C" fn(
            mem_type: nixl_capi_mem_type_t,
            dlist: *mut nixl_capi_remote_dlist_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_destroy_remote_dlist: Result<
        unsafe extern "C" fn(dlist: nixl_capi_remote_dlist_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_remote_dlist_add_desc: Result<
        unsafe extern "C" fn(
            dlist: nixl_capi_remote_dlist_t,
            addr: usize,
            len: usize,
            dev_id: u64,
            remote_agent: *const ::core::ffi::c_char,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_register_mem: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            dlist: nixl_capi_reg_dlist_t,
            opt_args: nixl_capi_opt_args_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_deregister_mem: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            dlist: nixl_capi_reg_dlist_t,
            opt_args: nixl_capi_opt_args_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_query_mem: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            descs: nixl_capi_reg_dlist_t,
            resp: nixl_capi_query_resp_list_t,
            opt_args: nixl_capi_opt_args_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_create_query_resp_list: Result<
        unsafe extern "C" fn(list: *mut nixl_capi_query_resp_list_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_destroy_query_resp_list: Result<
        unsafe extern "C" fn(list: nixl_capi_query_resp_list_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_query_resp_list_size: Result<
        unsafe extern "C" fn(
            list: nixl_capi_query_resp_list_t,
            size: *mut usize,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_query_resp_list_has_value: Result<
        unsafe extern "C" fn(
            list: nixl_capi_query_resp_list_t,
            index: usize,
            has_value: *mut bool,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_query_resp_list_get_params: Result<
        unsafe extern "C" fn(
            list: nixl_capi_query_resp_list_t,
            index: usize,
            params: *mut nixl_capi_params_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_prep_mem_view_local: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            descs: nixl_capi_xfer_dlist_t,
            view: *mut nixl_capi_mem_view_t,
            opt_args: nixl_capi_opt_args_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_prep_mem_view_remote: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            descs: nixl_capi_remote_dlist_t,
            view: *mut nixl_capi_mem_view_t,
            opt_args: nixl_capi_opt_args_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_release_mem_view: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            view: nixl_capi_mem_view_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_prep_xfer_dlist: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            agent_name: *const ::core::ffi::c_char,
            descs: nixl_capi_xfer_dlist_t,
            handle: *mut nixl_capi_xfer_dlist_handle_t,
            opt_args: nixl_capi_opt_args_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_release_xfer_dlist_handle: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            handle: nixl_capi_xfer_dlist_handle_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_make_xfer_req: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            operation: nixl_capi_xfer_op_t,
            local_descs: nixl_capi_xfer_dlist_handle_t,
            local_indices: *const ::core::ffi::c_int,
            local_indices_count: usize,
            remote_descs: nixl_capi_xfer_dlist_handle_t,
            remote_indices: *const ::core::ffi::c_int,
            remote_indices_count: usize,
            req: *mut nixl_capi_xfer_req_t,
            opt_args: nixl_capi_opt_args_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_create_xfer_req: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            operation: nixl_capi_xfer_op_t,
            local_descs: nixl_capi_xfer_dlist_t,
            remote_descs: nixl_capi_xfer_dlist_t,
            remote_agent: *const ::core::ffi::c_char,
            req: *mut nixl_capi_xfer_req_t,
            opt_args: nixl_capi_opt_args_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_estimate_xfer_cost: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            req: nixl_capi_xfer_req_t,
            opt_args: nixl_capi_opt_args_t,
            duration_us: *mut i64,
            err_margin_us: *mut i64,
            method: *mut nixl_capi_cost_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_post_xfer_req: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            req: nixl_capi_xfer_req_t,
            opt_args: nixl_capi_opt_args_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_get_xfer_status: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            req: nixl_capi_xfer_req_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_query_xfer_backend: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            req: nixl_capi_xfer_req_t,
            backend: *mut nixl_capi_backend_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_get_xfer_telemetry: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            req: nixl_capi_xfer_req_t,
            telemetry: nixl_capi_xfer_telemetry_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_release_xfer_req: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            req: nixl_capi_xfer_req_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_destroy_xfer_req: Result<
        unsafe extern "C" fn(req: nixl_capi_xfer_req_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_gen_notif: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            remote_agent: *const ::core::ffi::c_char,
            data: *const ::core::ffi::c_void,
            len: usize,
            opt_args: nixl_capi_opt_args_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_get_notifs: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            map: nixl_capi_notif_map_t,
            opt_args: nixl_capi_opt_args_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_create_notif_map: Result<
        unsafe extern "C" fn(map: *mut nixl_capi_notif_map_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_destroy_notif_map: Result<
        unsafe extern "C" fn(map: nixl_capi_notif_map_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_notif_map_size: Result<
        unsafe extern "C" fn(map: nixl_capi_notif_map_t, size: *mut usize) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_notif_map_get_agent_at: Result<
        unsafe extern "C" fn(
            map: nixl_capi_notif_map_t,
            index: usize,
            agent_name: *mut *const ::core::ffi::c_char,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_notif_map_get_notifs_size: Result<
        unsafe extern "C" fn(
            map: nixl_capi_notif_map_t,
            agent_name: *const ::core::ffi::c_char,
            size: *mut usize,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_notif_map_get_notif: Result<
        unsafe extern "C" fn(
            map: nixl_capi_notif_map_t,
            agent_name: *const ::core::ffi::c_char,
            index: usize,
            data: *mut *const ::core::ffi::c_void,
            len: *mut usize,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_notif_map_clear: Result<
        unsafe extern "C" fn(map: nixl_capi_notif_map_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
}
impl NixlCapi {
    pub unsafe fn new<P>(path: P) -> Result<Self, ::libloading::Error>
    where
        P: AsRef<::std::ffi::OsStr>,
    {
        let path = path.as_ref();
        let library = unsafe { ::libloading::Library::new(path) }?;
        unsafe { Self::from_library(library) }
    }
    pub unsafe fn from_library<L>(library: L) -> Result<Self, ::libloading::Error>
    where
        L: Into<::libloading::Library>,
    {
        let __library = library.into();
        let nixl_capi_is_stub = unsafe { __library.get(b"nixl_capi_is_stub\0") }.map(|sym| *sym);
        let nixl_capi_create_agent =
            unsafe { __library.get(b"nixl_capi_create_agent\0") }.map(|sym| *sym);
        let nixl_capi_create_configured_agent =
            unsafe { __library.get(b"nixl_capi_create_configured_agent\0") }.map(|sym| *sym);
        let nixl_capi_destroy_agent =
            unsafe { __library.get(b"nixl_capi_destroy_agent\0") }.map(|sym| *sym);
        let nixl_capi_get_local_md =
            unsafe { __library.get(b"nixl_capi_get_local_md\0") }.map(|sym| *sym);
        let nixl_capi_get_local_partial_md =
            unsafe { __library.get(b"nixl_capi_get_local_partial_md\0") }.map(|sym| *sym);
        let nixl_capi_load_remote_md =
            unsafe { __library.get(b"nixl_capi_load_remote_md\0") }.map(|sym| *sym);
        let nixl_capi_invalidate_remote_md =
            unsafe { __library.get(b"nixl_capi_invalidate_remote_md\0") }.map(|sym| *sym);
        let nixl_capi_check_remote_md =
            unsafe { __library.get(b"nixl_capi_check_remote_md\0") }.map(|sym| *sym);
        let nixl_capi_send_local_md =
            unsafe { __library.get(b"nixl_capi_send_local_md\0") }.map(|sym| *sym);
        let nixl_capi_send_local_partial_md =
            unsafe { __library.get(b"nixl_capi_send_local_partial_md\0") }.map(|sym| *sym);
        let nixl_capi_fetch_remote_md =
            unsafe { __library.get(b"nixl_capi_fetch_remote_md\0") }.map(|sym| *sym);
        let nixl_capi_invalidate_local_md =
            unsafe { __library.get(b"nixl_capi_invalidate_local_md\0") }.map(|sym| *sym);
        let nixl_capi_agent_make_connection =
            unsafe { __library.get(b"nixl_capi_agent_make_connection\0") }.map(|sym| *sym);
        let nixl_capi_get_available_plugins =
            unsafe { __library.get(b"nixl_capi_get_available_plugins\0") }.map(|sym| *sym);
        let nixl_capi_get_plugin_params =
            unsafe { __library.get(b"nixl_capi_get_plugin_params\0") }.map(|sym| *sym);
        let nixl_capi_create_backend =
            unsafe { __library.get(b"nixl_capi_create_backend\0") }.map(|sym| *sym);
        let nixl_capi_get_backend_params =
            unsafe { __library.get(b"nixl_capi_get_backend_params\0") }.map(|sym| *sym);
        let nixl_capi_destroy_backend =
            unsafe { __library.get(b"nixl_capi_destroy_backend\0") }.map(|sym| *sym);
        let nixl_capi_string_list_size =
            unsafe { __library.get(b"nixl_capi_string_list_size\0") }.map(|sym| *sym);
        let nixl_capi_string_list_get =
            unsafe { __library.get(b"nixl_capi_string_list_get\0") }.map(|sym| *sym);
        let nixl_capi_destroy_string_list =
            unsafe { __library.get(b"nixl_capi_destroy_string_list\0") }.map(|sym| *sym);
        let nixl_capi_mem_list_is_empty =
            unsafe { __library.get(b"nixl_capi_mem_list_is_empty\0") }.map(|sym| *sym);
        let nixl_capi_mem_list_size =
            unsafe { __library.get(b"nixl_capi_mem_list_size\0") }.map(|sym| *sym);
        let nixl_capi_mem_list_get =
            unsafe { __library.get(b"nixl_capi_mem_list_get\0") }.map(|sym| *sym);
        let nixl_capi_mem_type_to_string =
            unsafe { __library.get(b"nixl_capi_mem_type_to_string\0") }.map(|sym| *sym);
        let nixl_capi_destroy_mem_list =
            unsafe { __library.get(b"nixl_capi_destroy_mem_list\0") }.map(|sym| *sym);
        let nixl_capi_create_params =
            unsafe { __library.get(b"nixl_capi_create_params\0") }.map(|sym| *sym);
        let nixl_capi_params_add =
            unsafe { __library.get(b"nixl_capi_params_add\0") }.map(|sym| *sym);
        let nixl_capi_params_is_empty =
            unsafe { __library.get(b"nixl_capi_params_is_empty\0") }.map(|sym| *sym);
        let nixl_capi_params_create_iterator =
            unsafe { __library.get(b"nixl_capi_params_create_iterator\0") }.map(|sym| *sym);
        let nixl_capi_params_iterator_next =
            unsafe { __library.get(b"nixl_capi_params_iterator_next\0") }.map(|sym| *sym);
        let nixl_capi_params_destroy_iterator =
            unsafe { __library.get(b"nixl_capi_params_destroy_iterator\0") }.map(|sym| *sym);
        let nixl_capi_destroy_params =
            unsafe { __library.get(b"nixl_capi_destroy_params\0") }.map(|sym| *sym);
        let nixl_capi_create_opt_args =
            unsafe { __library.get(b"nixl_capi_create_opt_args\0") }.map(|sym| *sym);
        let nixl_capi_destroy_opt_args =
            unsafe { __library.get(b"nixl_capi_destroy_opt_args\0") }.map(|sym| *sym);
        let nixl_capi_opt_args_add_backend =
            unsafe { __library.get(b"nixl_capi_opt_args_add_backend\0") }.map(|sym| *sym);
        let nixl_capi_opt_args_set_notif_msg =
            unsafe { __library.get(b"nixl_capi_opt_args_set_notif_msg\0") }.map(|sym| *sym);
        let nixl_capi_opt_args_get_notif_msg =
            unsafe { __library.get(b"nixl_capi_opt_args_get_notif_msg\0") }.map(|sym| *sym);
        let nixl_capi_opt_args_set_has_notif =
            unsafe { __library.get(b"nixl_capi_opt_args_set_has_notif\0") }.map(|sym| *sym);
        let nixl_capi_opt_args_get_has_notif =
            unsafe { __library.get(b"nixl_capi_opt_args_get_has_notif\0") }.map(|sym| *sym);
        let nixl_capi_opt_args_set_skip_desc_merge =
            unsafe { __library.get(b"nixl_capi_opt_args_set_skip_desc_merge\0") }.map(|sym| *sym);
        let nixl_capi_opt_args_get_skip_desc_merge =
            unsafe { __library.get(b"nixl_capi_opt_args_get_skip_desc_merge\0") }.map(|sym| *sym);
        let nixl_capi_opt_args_set_ip_addr =
            unsafe { __library.get(b"nixl_capi_opt_args_set_ip_addr\0") }.map(|sym| *sym);
        let nixl_capi_opt_args_set_port =
            unsafe { __library.get(b"nixl_capi_opt_args_set_port\0") }.map(|sym| *sym);
        let nixl_capi_opt_args_set_custom_param =
            unsafe { __library.get(b"nixl_capi_opt_args_set_custom_param\0") }.map(|sym| *sym);
        let nixl_capi_opt_args_get_custom_param =
            unsafe { __library.get(b"nixl_capi_opt_args_get_custom_param\0") }.map(|sym| *sym);
        let nixl_capi_create_xfer_dlist =
            unsafe { __library.get(b"nixl_capi_create_xfer_dlist\0") }.map(|sym| *sym);
        let nixl_capi_destroy_xfer_dlist =
            unsafe { __library.get(b"nixl_capi_destroy_xfer_dlist\0") }.map(|sym| *sym);
        let nixl_capi_xfer_dlist_get_type =
            unsafe { __library.get(b"nixl_capi_xfer_dlist_get_type\0") }.map(|sym| *sym);
        let nixl_capi_xfer_dlist_add_desc =
            unsafe { __library.get(b"nixl_capi_xfer_dlist_add_desc\0") }.map(|sym| *sym);
        let nixl_capi_xfer_dlist_desc_count =
            unsafe { __library.get(b"nixl_capi_xfer_dlist_desc_count\0") }.map(|sym| *sym);
        let nixl_capi_xfer_dlist_len =
            unsafe { __library.get(b"nixl_capi_xfer_dlist_len\0") }.map(|sym| *sym);
        let nixl_capi_xfer_dlist_is_empty =
            unsafe { __library.get(b"nixl_capi_xfer_dlist_is_empty\0") }.map(|sym| *sym);
        let nixl_capi_xfer_dlist_trim =
            unsafe { __library.get(b"nixl_capi_xfer_dlist_trim\0") }.map(|sym| *sym);
        let nixl_capi_xfer_dlist_rem_desc =
            unsafe { __library.get(b"nixl_capi_xfer_dlist_rem_desc\0") }.map(|sym| *sym);
        let nixl_capi_xfer_dlist_clear =
            unsafe { __library.get(b"nixl_capi_xfer_dlist_clear\0") }.map(|sym| *sym);
        let nixl_capi_xfer_dlist_resize =
            unsafe { __library.get(b"nixl_capi_xfer_dlist_resize\0") }.map(|sym| *sym);
        let nixl_capi_xfer_dlist_print =
            unsafe { __library.get(b"nixl_capi_xfer_dlist_print\0") }.map(|sym| *sym);
        let nixl_capi_create_reg_dlist =
            unsafe { __library.get(b"nixl_capi_create_reg_dlist\0") }.map(|sym| *sym);
        let nixl_capi_destroy_reg_dlist =
            unsafe { __library.get(b"nixl_capi_destroy_reg_dlist\0") }.map(|sym| *sym);
        let nixl_capi_reg_dlist_get_type =
            unsafe { __library.get(b"nixl_capi_reg_dlist_get_type\0") }.map(|sym| *sym);
        let nixl_capi_reg_dlist_add_desc =
            unsafe { __library.get(b"nixl_capi_reg_dlist_add_desc\0") }.map(|sym| *sym);
        let nixl_capi_reg_dlist_desc_count =
            unsafe { __library.get(b"nixl_capi_reg_dlist_desc_count\0") }.map(|sym| *sym);
        let nixl_capi_reg_dlist_is_empty =
            unsafe { __library.get(b"nixl_capi_reg_dlist_is_empty\0") }.map(|sym| *sym);
        let nixl_capi_reg_dlist_trim =
            unsafe { __library.get(b"nixl_capi_reg_dlist_trim\0") }.map(|sym| *sym);
        let nixl_capi_reg_dlist_rem_desc =
            unsafe { __library.get(b"nixl_capi_reg_dlist_rem_desc\0") }.map(|sym| *sym);
        let nixl_capi_reg_dlist_clear =
            unsafe { __library.get(b"nixl_capi_reg_dlist_clear\0") }.map(|sym| *sym);
        let nixl_capi_reg_dlist_resize =
            unsafe { __library.get(b"nixl_capi_reg_dlist_resize\0") }.map(|sym| *sym);
        let nixl_capi_reg_dlist_print =
            unsafe { __library.get(b"nixl_capi_reg_dlist_print\0") }.map(|sym| *sym);
        let nixl_capi_create_remote_dlist =
            unsafe { __library.get(b"nixl_capi_create_remote_dlist\0") }.map(|sym| *sym);
        let nixl_capi_destroy_remote_dlist =
            unsafe { __library.get(b"nixl_capi_destroy_remote_dlist\0") }.map(|sym| *sym);
        let nixl_capi_remote_dlist_add_desc =
            unsafe { __library.get(b"nixl_capi_remote_dlist_add_desc\0") }.map(|sym| *sym);
        let nixl_capi_register_mem =
            unsafe { __library.get(b"nixl_capi_register_mem\0") }.map(|sym| *sym);
        let nixl_capi_deregister_mem =
            unsafe { __library.get(b"nixl_capi_deregister_mem\0") }.map(|sym| *sym);
        let nixl_capi_query_mem =
            unsafe { __library.get(b"nixl_capi_query_mem\0") }.map(|sym| *sym);
        let nixl_capi_create_query_resp_list =
            unsafe { __library.get(b"nixl_capi_create_query_resp_list\0") }.map(|sym| *sym);
        let nixl_capi_destroy_query_resp_list =
            unsafe { __library.get(b"nixl_capi_destroy_query_resp_list\0") }.map(|sym| *sym);
        let nixl_capi_query_resp_list_size =
            unsafe { __library.get(b"nixl_capi_query_resp_list_size\0") }.map(|sym| *sym);
        let nixl_capi_query_resp_list_has_value =
            unsafe { __library.get(b"nixl_capi_query_resp_list_has_value\0") }.map(|sym| *sym);
        let nixl_capi_query_resp_list_get_params =
            unsafe { __library.get(b"nixl_capi_query_resp_list_get_params\0") }.map(|sym| *sym);
        let nixl_capi_prep_mem_view_local =
            unsafe { __library.get(b"nixl_capi_prep_mem_view_local\0") }.map(|sym| *sym);
        let nixl_capi_prep_mem_view_remote =
            unsafe { __library.get(b"nixl_capi_prep_mem_view_remote\0") }.map(|sym| *sym);
        let nixl_capi_release_mem_view =
            unsafe { __library.get(b"nixl_capi_release_mem_view\0") }.map(|sym| *sym);
        let nixl_capi_prep_xfer_dlist =
            unsafe { __library.get(b"nixl_capi_prep_xfer_dlist\0") }.map(|sym| *sym);
        let nixl_capi_release_xfer_dlist_handle =
            unsafe { __library.get(b"nixl_capi_release_xfer_dlist_handle\0") }.map(|sym| *sym);
        let nixl_capi_make_xfer_req =
            unsafe { __library.get(b"nixl_capi_make_xfer_req\0") }.map(|sym| *sym);
        let nixl_capi_create_xfer_req =
            unsafe { __library.get(b"nixl_capi_create_xfer_req\0") }.map(|sym| *sym);
        let nixl_capi_estimate_xfer_cost =
            unsafe { __library.get(b"nixl_capi_estimate_xfer_cost\0") }.map(|sym| *sym);
        let nixl_capi_post_xfer_req =
            unsafe { __library.get(b"nixl_capi_post_xfer_req\0") }.map(|sym| *sym);
        let nixl_capi_get_xfer_status =
            unsafe { __library.get(b"nixl_capi_get_xfer_status\0") }.map(|sym| *sym);
        let nixl_capi_query_xfer_backend =
            unsafe { __library.get(b"nixl_capi_query_xfer_backend\0") }.map(|sym| *sym);
        let nixl_capi_get_xfer_telemetry =
            unsafe { __library.get(b"nixl_capi_get_xfer_telemetry\0") }.map(|sym| *sym);
        let nixl_capi_release_xfer_req =
            unsafe { __library.get(b"nixl_capi_release_xfer_req\0") }.map(|sym| *sym);
        let nixl_capi_destroy_xfer_req =
            unsafe { __library.get(b"nixl_capi_destroy_xfer_req\0") }.map(|sym| *sym);
        let nixl_capi_gen_notif =
            unsafe { __library.get(b"nixl_capi_gen_notif\0") }.map(|sym| *sym);
        let nixl_capi_get_notifs =
            unsafe { __library.get(b"nixl_capi_get_notifs\0") }.map(|sym| *sym);
        let nixl_capi_create_notif_map =
            unsafe { __library.get(b"nixl_capi_create_notif_map\0") }.map(|sym| *sym);
        let nixl_capi_destroy_notif_map =
            unsafe { __library.get(b"nixl_capi_destroy_notif_map\0") }.map(|sym| *sym);
        let nixl_capi_notif_map_size =
            unsafe { __library.get(b"nixl_capi_notif_map_size\0") }.map(|sym| *sym);
        let nixl_capi_notif_map_get_agent_at =
            unsafe { __library.get(b"nixl_capi_notif_map_get_agent_at\0") }.map(|sym| *sym);
        let nixl_capi_notif_map_get_notifs_size =
            unsafe { __library.get(b"nixl_capi_notif_map_get_notifs_size\0") }.map(|sym| *sym);
        let nixl_capi_notif_map_get_notif =
            unsafe { __library.get(b"nixl_capi_notif_map_get_notif\0") }.map(|sym| *sym);
        let nixl_capi_notif_map_clear =
            unsafe { __library.get(b"nixl_capi_notif_map_clear\0") }.map(|sym| *sym);
        Ok(NixlCapi {
            __library,
            nixl_capi_is_stub,
            nixl_capi_create_agent,
            nixl_capi_create_configured_agent,
            nixl_capi_destroy_agent,
            nixl_capi_get_local_md,
            nixl_capi_get_local_partial_md,
            nixl_capi_load_remote_md,
            nixl_capi_invalidate_remote_md,
            nixl_capi_check_remote_md,
            nixl_capi_send_local_md,
            nixl_capi_send_local_partial_md,
            nixl_capi_fetch_remote_md,
            nixl_capi_invalidate_local_md,
            nixl_capi_agent_make_connection,
            nixl_capi_get_available_plugins,
            nixl_capi_get_plugin_params,
            nixl_capi_create_backend,
            nixl_capi_get_backend_params,
            nixl_capi_destroy_backend,
            nixl_capi_string_list_size,
            nixl_capi_string_list_get,
            nixl_capi_destroy_string_list,
            nixl_capi_mem_list_is_empty,
            nixl_capi_mem_list_size,
            nixl_capi_mem_list_get,
            nixl_capi_mem_type_to_string,
            nixl_capi_destroy_mem_list,
            nixl_capi_create_params,
            nixl_capi_params_add,
            nixl_capi_params_is_empty,
            nixl_capi_params_create_iterator,
            nixl_capi_params_iterator_next,
            nixl_capi_params_destroy_iterator,
            nixl_capi_destroy_params,
            nixl_capi_create_opt_args,
            nixl_capi_destroy_opt_args,
            nixl_capi_opt_args_add_backend,
            nixl_capi_opt_args_set_notif_msg,
            nixl_capi_opt_args_get_notif_msg,
            nixl_capi_opt_args_set_has_notif,
            nixl_capi_opt_args_get_has_notif,
            nixl_capi_opt_args_set_skip_desc_merge,
            nixl_capi_opt_args_get_skip_desc_merge,
            nixl_capi_opt_args_set_ip_addr,
            nixl_capi_opt_args_set_port,
            nixl_capi_opt_args_set_custom_param,
            nixl_capi_opt_args_get_custom_param,
            nixl_capi_create_xfer_dlist,
            nixl_capi_destroy_xfer_dlist,
            nixl_capi_xfer_dlist_get_type,
            nixl_capi_xfer_dlist_add_desc,
            nixl_capi_xfer_dlist_desc_count,
            nixl_capi_xfer_dlist_len,
            nixl_capi_xfer_dlist_is_empty,
            nixl_capi_xfer_dlist_trim,
            nixl_capi_xfer_dlist_rem_desc,
            nixl_capi_xfer_dlist_clear,
            nixl_capi_xfer_dlist_resize,
            nixl_capi_xfer_dlist_print,
            nixl_capi_create_reg_dlist,
            nixl_capi_destroy_reg_dlist,
            nixl_capi_reg_dlist_get_type,
            nixl_capi_reg_dlist_add_desc,
            nixl_capi_reg_dlist_desc_count,
            nixl_capi_reg_dlist_is_empty,
            nixl_capi_reg_dlist_trim,
            nixl_capi_reg_dlist_rem_desc,
            nixl_capi_reg_dlist_clear,
            nixl_capi_reg_dlist_resize,
            nixl_capi_reg_dlist_print,
            nixl_capi_create_remote_dlist,
            nixl_capi_destroy_remote_dlist,
            nixl_capi_remote_dlist_add_desc,
            nixl_capi_register_mem,
            nixl_capi_deregister_mem,
            nixl_capi_query_mem,
            nixl_capi_create_query_resp_list,
            nixl_capi_destroy_query_resp_list,
            nixl_capi_query_resp_list_size,
            nixl_capi_query_resp_list_has_value,
            nixl_capi_query_resp_list_get_params,
            nixl_capi_prep_mem_view_local,
            nixl_capi_prep_mem_view_remote,
            nixl_capi_release_mem_view,
            nixl_capi_prep_xfer_dlist,
            nixl_capi_release_xfer_dlist_handle,
            nixl_capi_make_xfer_req,
            nixl_capi_create_xfer_req,
            nixl_capi_estimate_xfer_cost,
            nixl_capi_post_xfer_req,
            nixl_capi_get_xfer_status,
            nixl_capi_query_xfer_backend,
            nixl_capi_get_xfer_telemetry,
            nixl_capi_release_xfer_req,
            nixl_capi_destroy_xfer_req,
            nixl_capi_gen_notif,
            nixl_capi_get_notifs,
            nixl_capi_create_notif_map,
            nixl_capi_destroy_notif_map,
            nixl_capi_notif_map_size,
            nixl_capi_notif_map_get_agent_at,
            nixl_capi_notif_map_get_notifs_size,
            nixl_capi_notif_map_get_notif,
            nixl_capi_notif_map_clear,
        })
    }
    pub unsafe fn nixl_capi_is_stub(&self) -> bool {
        unsafe {
            (self
                .nixl_capi_is_stub
                .as_ref()
                .expect("Expected function, got error."))()
        }
    }
    pub unsafe fn nixl_capi_create_agent(
        &self,
        name: *const ::core::ffi::c_char,
        agent: *mut nixl_capi_agent_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_create_agent
                .as_ref()
                .expect("Expected function, got error."))(name, agent)
        }
    }
    pub unsafe fn nixl_capi_create_configured_agent(
        &self,
        name: *const ::core::ffi::c_char,
        config: *const nixl_capi_agent_config_t,
        agent: *mut nixl_capi_agent_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_create_configured_agent
                .as_ref()
                .expect("Expected function, got error."))(name, config, agent)
        }
    }
    pub unsafe fn nixl_capi_destroy_agent(&self, agent: nixl_capi_agent_t) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_destroy_agent
                .as_ref()
                .expect("Expected function, got error."))(agent)
        }
    }
    pub unsafe fn nixl_capi_get_local_md(
        &self,
        agent: nixl_capi_agent_t,
        data: *mut *mut ::core::ffi::c_void,
        len: *mut usize,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_get_local_md
                .as_ref()
                .expect("Expected function, got error."))(agent, data, len)
        }
    }
    pub unsafe fn nixl_capi_get_local_partial_md(
        &self,
        agent: nixl_capi_agent_t,
        descs: nixl_capi_reg_dlist_t,
        data: *mut *mut ::core::ffi::c_void,
        len: *mut usize,
        opt_args: nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_get_local_partial_md
                .as_ref()
                .expect("Expected function, got error."))(
                agent, descs, data, len, opt_args
            )
        }
    }
    pub unsafe fn nixl_capi_load_remote_md(
        &self,
        agent: nixl_capi_agent_t,
        data: *const ::core::ffi::c_void,
        len: usize,
        agent_name: *mut *mut ::core::ffi::c_char,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_load_remote_md
                .as_ref()
                .expect("Expected function, got error."))(agent, data, len, agent_name)
        }
    }
    pub unsafe fn nixl_capi_invalidate_remote_md(
        &self,
        agent: nixl_capi_agent_t,
        remote_agent: *const ::core::ffi::c_char,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_invalidate_remote_md
                .as_ref()
                .expect("Expected function, got error."))(agent, remote_agent)
        }
    }
    pub unsafe fn nixl_capi_check_remote_md(
        &self,
        agent: nixl_capi_agent_t,
        remote_agent: *const ::core::ffi::c_char,
        descs: nixl_capi_xfer_dlist_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_check_remote_md
                .as_ref()
                .expect("Expected function, got error."))(agent, remote_agent, descs)
        }
    }
    pub unsafe fn nixl_capi_send_local_md(
        &self,
        agent: nixl_capi_agent_t,
        opt_args: nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_send_local_md
                .as_ref()
                .expect("Expected function, got error."))(agent, opt_args)
        }
    }
    pub unsafe fn nixl_capi_send_local_partial_md(
        &self,
        agent: nixl_capi_agent_t,
        descs: nixl_capi_reg_dlist_t,
        opt_args: nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_send_local_partial_md
                .as_ref()
                .expect("Expected function, got error."))(agent, descs, opt_args)
        }
    }
    pub unsafe fn nixl_capi_fetch_remote_md(
        &self,
        agent: nixl_capi_agent_t,
        remote_agent: *const ::core::ffi::c_char,
        opt_args: nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_fetch_remote_md
                .as_ref()
                .expect("Expected function, got error."))(agent, remote_agent, opt_args)
        }
    }
    pub unsafe fn nixl_capi_invalidate_local_md(
        &self,
        agent: nixl_capi_agent_t,
        opt_args: nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_invalidate_local_md
                .as_ref()
                .expect("Expected function, got error."))(agent, opt_args)
        }
    }
    pub unsafe fn nixl_capi_agent_make_connection(
        &self,
        agent: nixl_capi_agent_t,
        remote_agent: *const ::core::ffi::c_char,
        opt_args: nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_agent_make_connection
                .as_ref()
                .expect("Expected function, got error."))(agent, remote_agent, opt_args)
        }
    }
    pub unsafe fn nixl_capi_get_available_plugins(
        &self,
        agent: nixl_capi_agent_t,
        plugins: *mut nixl_capi_string_list_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_get_available_plugins
                .as_ref()
                .expect("Expected function, got error."))(agent, plugins)
        }
    }
    pub unsafe fn nixl_capi_get_plugin_params(
        &self,
        agent: nixl_capi_agent_t,
        plugin_name: *const ::core::ffi::c_char,
        mems: *mut nixl_capi_mem_list_t,
        params: *mut nixl_capi_params_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_get_plugin_params
                .as_ref()
                .expect("Expected function, got error."))(
                agent, plugin_name, mems, params
            )
        }
    }
    pub unsafe fn nixl_capi_create_backend(
        &self,
        agent: nixl_capi_agent_t,
        plugin_name: *const ::core::ffi::c_char,
        params: nixl_capi_params_t,
        backend: *mut nixl_capi_backend_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_create_backend
                .as_ref()
                .expect("Expected function, got error."))(
                agent, plugin_name, params, backend
            )
        }
    }
    pub unsafe fn nixl_capi_get_backend_params(
        &self,
        agent: nixl_capi_agent_t,
        backend: nixl_capi_backend_t,
        mems: *mut nixl_capi_mem_list_t,
        params: *mut nixl_capi_params_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_get_backend_params
                .as_ref()
                .expect("Expected function, got error."))(agent, backend, mems, params)
        }
    }
    pub unsafe fn nixl_capi_destroy_backend(
        &self,
        backend: nixl_capi_backend_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_destroy_backend
                .as_ref()
                .expect("Expected function, got error."))(backend)
        }
    }
    pub unsafe fn nixl_capi_string_list_size(
        &self,
        list: nixl_capi_string_list_t,
        size: *mut usize,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_string_list_size
                .as_ref()
                .expect("Expected function, got error."))(list, size)
        }
    }
    pub unsafe fn nixl_capi_string_list_get(
        &self,
        list: nixl_capi_string_list_t,
        index: usize,
        str_: *mut *const ::core::ffi::c_char,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_string_list_get
                .as_ref()
                .expect("Expected function, got error."))(list, index, str_)
        }
    }
    pub unsafe fn nixl_capi_destroy_string_list(
        &self,
        list: nixl_capi_string_list_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_destroy_string_list
                .as_ref()
                .expect("Expected function, got error."))(list)
        }
    }
    pub unsafe fn nixl_capi_mem_list_is_empty(
        &self,
        list: nixl_capi_mem_list_t,
        is_empty: *mut bool,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_mem_list_is_empty
                .as_ref()
                .expect("Expected function, got error."))(list, is_empty)
        }
    }
    pub unsafe fn nixl_capi_mem_list_size(
        &self,
        list: nixl_capi_mem_list_t,
        size: *mut usize,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_mem_list_size
                .as_ref()
                .expect("Expected function, got error."))(list, size)
        }
    }
    pub unsafe fn nixl_capi_mem_list_get(
        &self,
        list: nixl_capi_mem_list_t,
        index: usize,
        mem_type: *mut nixl_capi_mem_type_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_mem_list_get
                .as_ref()
                .expect("Expected function, got error."))(list, index, mem_type)
        }
    }
    pub unsafe fn nixl_capi_mem_type_to_string(
        &self,
        mem_type: nixl_capi_mem_type_t,
        str_: *mut *const ::core::ffi::c_char,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_mem_type_to_string
                .as_ref()
                .expect("Expected function, got error."))(mem_type, str_)
        }
    }
    pub unsafe fn nixl_capi_destroy_mem_list(
        &self,
        list: nixl_capi_mem_list_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_destroy_mem_list
                .as_ref()
                .expect("Expected function, got error."))(list)
        }
    }
    pub unsafe fn nixl_capi_create_params(
        &self,
        params: *mut nixl_capi_params_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_create_params
                .as_ref()
                .expect("Expected function, got error."))(params)
        }
    }
    pub unsafe fn nixl_capi_params_add(
        &self,
        params: nixl_capi_params_t,
        key: *const ::core::ffi::c_char,
        value: *const ::core::ffi::c_char,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_params_add
                .as_ref()
                .expect("Expected function, got error."))(params, key, value)
        }
    }
    pub unsafe fn nixl_capi_params_is_empty(
        &self,
        params: nixl_capi_params_t,
        is_empty: *mut bool,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_params_is_empty
                .as_ref()
                .expect("Expected function, got error."))(params, is_empty)
        }
    }
    pub unsafe fn nixl_capi_params_create_iterator(
        &self,
        params: nixl_capi_params_t,
        iter: *mut nixl_capi_param_iter_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_params_create_iterator
                .as_ref()
                .expect("Expected function, got error."))(params, iter)
        }
    }
    pub unsafe fn nixl_capi_params_iterator_next(
        &self,
        iter: nixl_capi_param_iter_t,
        key: *mut *const ::core::ffi::c_char,
        value: *mut *const ::core::ffi::c_char,
        has_next: *mut bool,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_params_iterator_next
                .as_ref()
                .expect("Expected function, got error."))(iter, key, value, has_next)
        }
    }
    pub unsafe fn nixl_capi_params_destroy_iterator(
        &self,
        iter: nixl_capi_param_iter_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_params_destroy_iterator
                .as_ref()
                .expect("Expected function, got error."))(iter)
        }
    }
    pub unsafe fn nixl_capi_destroy_params(
        &self,
        params: nixl_capi_params_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_destroy_params
                .as_ref()
                .expect("Expected function, got error."))(params)
        }
    }
    pub unsafe fn nixl_capi_create_opt_args(
        &self,
        args: *mut nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_create_opt_args
                .as_ref()
                .expect("Expected function, got error."))(args)
        }
    }
    pub unsafe fn nixl_capi_destroy_opt_args(
        &self,
        args: nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_destroy_opt_args
                .as_ref()
                .expect("Expected function, got error."))(args)
        }
    }
    pub unsafe fn nixl_capi_opt_args_add_backend(
        &self,
        args: nixl_capi_opt_args_t,
        backend: nixl_capi_backend_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_opt_args_add_backend
                .as_ref()
                .expect("Expected function, got error."))(args, backend)
        }
    }
    pub unsafe fn nixl_capi_opt_args_set_notif_msg(
        &self,
        args: nixl_capi_opt_args_t,
        data: *const ::core::ffi::c_void,
        len: usize,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_opt_args_set_notif_msg
                .as_ref()
                .expect("Expected function, got error."))(args, data, len)
        }
    }
    pub unsafe fn nixl_capi_opt_args_get_notif_msg(
        &self,
        args: nixl_capi_opt_args_t,
        data: *mut *mut ::core::ffi::c_void,
        len: *mut usize,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_opt_args_get_notif_msg
                .as_ref()
                .expect("Expected function, got error."))(args, data, len)
        }
    }
    pub unsafe fn nixl_capi_opt_args_set_has_notif(
        &self,
        args: nixl_capi_opt_args_t,
        has_notif: bool,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_opt_args_set_has_notif
                .as_ref()
                .expect("Expected function, got error."))(args, has_notif)
        }
    }
    pub unsafe fn nixl_capi_opt_args_get_has_notif(
        &self,
        args: nixl_capi_opt_args_t,
        has_notif: *mut bool,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_opt_args_get_has_notif
                .as_ref()
                .expect("Expected function, got error."))(args, has_notif)
        }
    }
    pub unsafe fn nixl_capi_opt_args_set_skip_desc_merge(
        &self,
        args: nixl_capi_opt_args_t,
        skip_merge: bool,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_opt_args_set_skip_desc_merge
                .as_ref()
                .expect("Expected function, got error."))(args, skip_merge)
        }
    }
    pub unsafe fn nixl_capi_opt_args_get_skip_desc_merge(
        &self,
        args: nixl_capi_opt_args_t,
        skip_merge: *mut bool,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_opt_args_get_skip_desc_merge
                .as_ref()
                .expect("Expected function, got error."))(args, skip_merge)
        }
    }
    pub unsafe fn nixl_capi_opt_args_set_ip_addr(
        &self,
        args: nixl_capi_opt_args_t,
        ip_addr: *const ::core::ffi::c_char,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_opt_args_set_ip_addr
                .as_ref()
                .expect("Expected function, got error."))(args, ip_addr)
        }
    }
    pub unsafe fn nixl_capi_opt_args_set_port(
        &self,
        args: nixl_capi_opt_args_t,
        port: u16,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_opt_args_set_port
                .as_ref()
                .expect("Expected function, got error."))(args, port)
        }
    }
    pub unsafe fn nixl_capi_opt_args_set_custom_param(
        &self,
        args: nixl_capi_opt_args_t,
        data: *const ::core::ffi::c_void,
        len: usize,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_opt_args_set_custom_param
                .as_ref()
                .expect("Expected function, got error."))(args, data, len)
        }
    }
    pub unsafe fn nixl_capi_opt_args_get_custom_param(
        &self,
        args: nixl_capi_opt_args_t,
        data: *mut *mut ::core::ffi::c_void,
        len: *mut usize,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_opt_args_get_custom_param
                .as_ref()
                .expect("Expected function, got error."))(args, data, len)
        }
    }
    pub unsafe fn nixl_capi_create_xfer_dlist(
        &self,
        mem_type: nixl_capi_mem_type_t,
        dlist: *mut nixl_capi_xfer_dlist_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_create_xfer_dlist
                .as_ref()
                .expect("Expected function, got error."))(mem_type, dlist)
        }
    }
    pub unsafe fn nixl_capi_destroy_xfer_dlist(
        &self,
        dlist: nixl_capi_xfer_dlist_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_destroy_xfer_dlist
                .as_ref()
                .expect("Expected function, got error."))(dlist)
        }
    }
    pub unsafe fn nixl_capi_xfer_dlist_get_type(
        &self,
        dlist: nixl_capi_xfer_dlist_t,
        mem_type: *mut nixl_capi_mem_type_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_xfer_dlist_get_type
                .as_ref()
                .expect("Expected function, got error."))(dlist, mem_type)
        }
    }
    pub unsafe fn nixl_capi_xfer_dlist_add_desc(
        &self,
        dlist: nixl_capi_xfer_dlist_t,
        addr: usize,
        len: usize,
        dev_id: u64,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_xfer_dlist_add_desc
                .as_ref()
                .expect("Expected function, got error."))(dlist, addr, len, dev_id)
        }
    }
    pub unsafe fn nixl_capi_xfer_dlist_desc_count(
        &self,
        dlist: nixl_capi_xfer_dlist_t,
        count: *mut usize,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_xfer_dlist_desc_count
                .as_ref()
                .expect("Expected function, got error."))(dlist, count)
        }
    }
    pub unsafe fn nixl_capi_xfer_dlist_len(
        &self,
        dlist: nixl_capi_xfer_dlist_t,
        len: *mut usize,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_xfer_dlist_len
                .as_ref()
                .expect("Expected function, got error."))(dlist, len)
        }
    }
    pub unsafe fn nixl_capi_xfer_dlist_is_empty(
        &self,
        dlist: nixl_capi_xfer_dlist_t,
        is_empty: *mut bool,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_xfer_dlist_is_empty
                .as_ref()
                .expect("Expected function, got error."))(dlist, is_empty)
        }
    }
    pub unsafe fn nixl_capi_xfer_dlist_trim(
        &self,
        dlist: nixl_capi_xfer_dlist_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_xfer_dlist_trim
                .as_ref()
                .expect("Expected function, got error."))(dlist)
        }
    }
    pub unsafe fn nixl_capi_xfer_dlist_rem_desc(
        &self,
        dlist: nixl_capi_xfer_dlist_t,
        index: ::core::ffi::c_int,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_xfer_dlist_rem_desc
                .as_ref()
                .expect("Expected function, got error."))(dlist, index)
        }
    }
    pub unsafe fn nixl_capi_xfer_dlist_clear(
        &self,
        dlist: nixl_capi_xfer_dlist_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_xfer_dlist_clear
                .as_ref()
                .expect("Expected function, got error."))(dlist)
        }
    }
    pub unsafe fn nixl_capi_xfer_dlist_resize(
        &self,
        dlist: nixl_capi_xfer_dlist_t,
        new_size: usize,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_xfer_dlist_resize
                .as_ref()
                .expect("Expected function, got error."))(dlist, new_size)
        }
    }
    pub unsafe fn nixl_capi_xfer_dlist_print(
        &self,
        dlist: nixl_capi_xfer_dlist_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_xfer_dlist_print
                .as_ref()
                .expect("Expected function, got error."))(dlist)
        }
    }
    pub unsafe fn nixl_capi_create_reg_dlist(
        &self,
        mem_type: nixl_capi_mem_type_t,
        dlist: *mut nixl_capi_reg_dlist_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_create_reg_dlist
                .as_ref()
                .expect("Expected function, got error."))(mem_type, dlist)
        }
    }
    pub unsafe fn nixl_capi_destroy_reg_dlist(
        &self,
        dlist: nixl_capi_reg_dlist_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_destroy_reg_dlist
                .as_ref()
                .expect("Expected function, got error."))(dlist)
        }
    }
    pub unsafe fn nixl_capi_reg_dlist_get_type(
        &self,
        dlist: nixl_capi_reg_dlist_t,
        mem_type: *mut nixl_capi_mem_type_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_reg_dlist_get_type
                .as_ref()
                .expect("Expected function, got error."))(dlist, mem_type)
        }
    }
    pub unsafe fn nixl_capi_reg_dlist_add_desc(
        &self,
        dlist: nixl_capi_reg_dlist_t,
        addr: usize,
        len: usize,
        dev_id: u64,
        metadata: *const ::core::ffi::c_void,
        metadata_len: usize,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_reg_dlist_add_desc
                .as_ref()
                .expect("Expected function, got error."))(
                dlist,
                addr,
                len,
                dev_id,
                metadata,
                metadata_len,
            )
        }
    }
    pub unsafe fn nixl_capi_reg_dlist_desc_count(
        &self,
        dlist: nixl_capi_reg_dlist_t,
        count: *mut usize,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_reg_dlist_desc_count
                .as_ref()
                .expect("Expected function, got error."))(dlist, count)
        }
    }
    pub unsafe fn nixl_capi_reg_dlist_is_empty(
        &self,
        dlist: nixl_capi_reg_dlist_t,
        is_empty: *mut bool,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_reg_dlist_is_empty
                .as_ref()
                .expect("Expected function, got error."))(dlist, is_empty)
        }
    }
    pub unsafe fn nixl_capi_reg_dlist_trim(
        &self,
        dlist: nixl_capi_reg_dlist_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_reg_dlist_trim
                .as_ref()
                .expect("Expected function, got error."))(dlist)
        }
    }
    pub unsafe fn nixl_capi_reg_dlist_rem_desc(
        &self,
        dlist: nixl_capi_reg_dlist_t,
        index: ::core::ffi::c_int,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_reg_dlist_rem_desc
                .as_ref()
                .expect("Expected function, got error."))(dlist, index)
        }
    }
    pub unsafe fn nixl_capi_reg_dlist_clear(
        &self,
        dlist: nixl_capi_reg_dlist_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_reg_dlist_clear
                .as_ref()
                .expect("Expected function, got error."))(dlist)
        }
    }
    pub unsafe fn nixl_capi_reg_dlist_resize(
        &self,
        dlist: nixl_capi_reg_dlist_t,
        new_size: usize,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_reg_dlist_resize
                .as_ref()
                .expect("Expected function, got error."))(dlist, new_size)
        }
    }
    pub unsafe fn nixl_capi_reg_dlist_print(
        &self,
        dlist: nixl_capi_reg_dlist_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_reg_dlist_print
                .as_ref()
                .expect("Expected function, got error."))(dlist)
        }
    }
    pub unsafe fn nixl_capi_create_remote_dlist(
        &self,
        mem_type: nixl_capi_mem_type_t,
        dlist: *mut nixl_capi_remote_dlist_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_create_remote_dlist
                .as_ref()
                .expect("Expected function, got error."))(mem_type, dlist)
        }
    }
    pub unsafe fn nixl_capi_destroy_remote_dlist(
        &self,
        dlist: nixl_capi_remote_dlist_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_destroy_remote_dlist
                .as_ref()
                .expect("Expected function, got error."))(dlist)
        }
    }
    pub unsafe fn nixl_capi_remote_dlist_add_desc(
        &self,
        dlist: nixl_capi_remote_dlist_t,
        addr: usize,
        len: usize,
        dev_id: u64,
        remote_agent: *const ::core::ffi::c_char,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_remote_dlist_add_desc
                .as_ref()
                .expect("Expected function, got error."))(
                dlist, addr, len, dev_id, remote_agent
            )
        }
    }
    pub unsafe fn nixl_capi_register_mem(
        &self,
        agent: nixl_capi_agent_t,
        dlist: nixl_capi_reg_dlist_t,
        opt_args: nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_register_mem
                .as_ref()
                .expect("Expected function, got error."))(agent, dlist, opt_args)
        }
    }
    pub unsafe fn nixl_capi_deregister_mem(
        &self,
        agent: nixl_capi_agent_t,
        dlist: nixl_capi_reg_dlist_t,
        opt_args: nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_deregister_mem
                .as_ref()
                .expect("Expected function, got error."))(agent, dlist, opt_args)
        }
    }
    pub unsafe fn nixl_capi_query_mem(
        &self,
        agent: nixl_capi_agent_t,
        descs: nixl_capi_reg_dlist_t,
        resp: nixl_capi_query_resp_list_t,
        opt_args: nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_query_mem
                .as_ref()
                .expect("Expected function, got error."))(agent, descs, resp, opt_args)
        }
    }
    pub unsafe fn nixl_capi_create_query_resp_list(
        &self,
        list: *mut nixl_capi_query_resp_list_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_create_query_resp_list
                .as_ref()
                .expect("Expected function, got error."))(list)
        }
    }
    pub unsafe fn nixl_capi_destroy_query_resp_list(
        &self,
        list: nixl_capi_query_resp_list_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_destroy_query_resp_list
                .as_ref()
                .expect("Expected function, got error."))(list)
        }
    }
    pub unsafe fn nixl_capi_query_resp_list_size(
        &self,
        list: nixl_capi_query_resp_list_t,
        size: *mut usize,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_query_resp_list_size
                .as_ref()
                .expect("Expected function, got error."))(list, size)
        }
    }
    pub unsafe fn nixl_capi_query_resp_list_has_value(
        &self,
        list: nixl_capi_query_resp_list_t,
        index: usize,
        has_value: *mut bool,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_query_resp_list_has_value
                .as_ref()
                .expect("Expected function, got error."))(list, index, has_value)
        }
    }
    pub unsafe fn nixl_capi_query_resp_list_get_params(
        &self,
        list: nixl_capi_query_resp_list_t,
        index: usize,
        params: *mut nixl_capi_params_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_query_resp_list_get_params
                .as_ref()
                .expect("Expected function, got error."))(list, index, params)
        }
    }
    pub unsafe fn nixl_capi_prep_mem_view_local(
        &self,
        agent: nixl_capi_agent_t,
        descs: nixl_capi_xfer_dlist_t,
        view: *mut nixl_capi_mem_view_t,
        opt_args: nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_prep_mem_view_local
                .as_ref()
                .expect("Expected function, got error."))(agent, descs, view, opt_args)
        }
    }
    pub unsafe fn nixl_capi_prep_mem_view_remote(
        &self,
        agent: nixl_capi_agent_t,
        descs: nixl_capi_remote_dlist_t,
        view: *mut nixl_capi_mem_view_t,
        opt_args: nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_prep_mem_view_remote
                .as_ref()
                .expect("Expected function, got error."))(agent, descs, view, opt_args)
        }
    }
    pub unsafe fn nixl_capi_release_mem_view(
        &self,
        agent: nixl_capi_agent_t,
        view: nixl_capi_mem_view_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_release_mem_view
                .as_ref()
                .expect("Expected function, got error."))(agent, view)
        }
    }
    pub unsafe fn nixl_capi_prep_xfer_dlist(
        &self,
        agent: nixl_capi_agent_t,
        agent_name: *const ::core::ffi::c_char,
        descs: nixl_capi_xfer_dlist_t,
        handle: *mut nixl_capi_xfer_dlist_handle_t,
        opt_args: nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_prep_xfer_dlist
                .as_ref()
                .expect("Expected function, got error."))(
                agent, agent_name, descs, handle, opt_args,
            )
        }
    }
    pub unsafe fn nixl_capi_release_xfer_dlist_handle(
        &self,
        agent: nixl_capi_agent_t,
        handle: nixl_capi_xfer_dlist_handle_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_release_xfer_dlist_handle
                .as_ref()
                .expect("Expected function, got error."))(agent, handle)
        }
    }
    pub unsafe fn nixl_capi_make_xfer_req(
        &self,
        agent: nixl_capi_agent_t,
        operation: nixl_capi_xfer_op_t,
        local_descs: nixl_capi_xfer_dlist_handle_t,
        local_indices: *const ::core::ffi::c_int,
        local_indices_count: usize,
        remote_descs: nixl_capi_xfer_dlist_handle_t,
        remote_indices: *const ::core::ffi::c_int,
        remote_indices_count: usize,
        req: *mut nixl_capi_xfer_req_t,
        opt_args: nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_make_xfer_req
                .as_ref()
                .expect("Expected function, got error."))(
                agent,
                operation,
                local_descs,
                local_indices,
                local_indices_count,
                remote_descs,
                remote_indices,
                remote_indices_count,
                req,
                opt_args,
            )
        }
    }
    pub unsafe fn nixl_capi_create_xfer_req(
        &self,
        agent: nixl_capi_agent_t,
        operation: nixl_capi_xfer_op_t,
        local_descs: nixl_capi_xfer_dlist_t,
        remote_descs: nixl_capi_xfer_dlist_t,
        remote_agent: *const ::core::ffi::c_char,
        req: *mut nixl_capi_xfer_req_t,
        opt_args: nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_create_xfer_req
                .as_ref()
                .expect("Expected function, got error."))(
                agent,
                operation,
                local_descs,
                remote_descs,
                remote_agent,
                req,
                opt_args,
            )
        }
    }
    pub unsafe fn nixl_capi_estimate_xfer_cost(
        &self,
        agent: nixl_capi_agent_t,
        req: nixl_capi_xfer_req_t,
        opt_args: nixl_capi_opt_args_t,
        duration_us: *mut i64,
        err_margin_us: *mut i64,
        method: *mut nixl_capi_cost_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_estimate_xfer_cost
                .as_ref()
                .expect("Expected function, got error."))(
                agent,
                req,
                opt_args,
                duration_us,
                err_margin_us,
                method,
            )
        }
    }
    pub unsafe fn nixl_capi_post_xfer_req(
        &self,
        agent: nixl_capi_agent_t,
        req: nixl_capi_xfer_req_t,
        opt_args: nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_post_xfer_req
                .as_ref()
                .expect("Expected function, got error."))(agent, req, opt_args)
        }
    }
    pub unsafe fn nixl_capi_get_xfer_status(
        &self,
        agent: nixl_capi_agent_t,
        req: nixl_capi_xfer_req_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_get_xfer_status
                .as_ref()
                .expect("Expected function, got error."))(agent, req)
        }
    }
    pub unsafe fn nixl_capi_query_xfer_backend(
        &self,
        agent: nixl_capi_agent_t,
        req: nixl_capi_xfer_req_t,
        backend: *mut nixl_capi_backend_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_query_xfer_backend
                .as_ref()
                .expect("Expected function, got error."))(agent, req, backend)
        }
    }
    pub unsafe fn nixl_capi_get_xfer_telemetry(
        &self,
        agent: nixl_capi_agent_t,
        req: nixl_capi_xfer_req_t,
        telemetry: nixl_capi_xfer_telemetry_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_get_xfer_telemetry
                .as_ref()
                .expect("Expected function, got error."))(agent, req, telemetry)
        }
    }
    pub unsafe fn nixl_capi_release_xfer_req(
        &self,
        agent: nixl_capi_agent_t,
        req: nixl_capi_xfer_req_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_release_xfer_req
                .as_ref()
                .expect("Expected function, got error."))(agent, req)
        }
    }
    pub unsafe fn nixl_capi_destroy_xfer_req(
        &self,
        req: nixl_capi_xfer_req_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_destroy_xfer_req
                .as_ref()
                .expect("Expected function, got error."))(req)
        }
    }
    pub unsafe fn nixl_capi_gen_notif(
        &self,
        agent: nixl_capi_agent_t,
        remote_agent: *const ::core::ffi::c_char,
        data: *const ::core::ffi::c_void,
        len: usize,
        opt_args: nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_gen_notif
                .as_ref()
                .expect("Expected function, got error."))(
                agent, remote_agent, data, len, opt_args
            )
        }
    }
    pub unsafe fn nixl_capi_get_notifs(
        &self,
        agent: nixl_capi_agent_t,
        map: nixl_capi_notif_map_t,
        opt_args: nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_get_notifs
                .as_ref()
                .expect("Expected function, got error."))(agent, map, opt_args)
        }
    }
    pub unsafe fn nixl_capi_create_notif_map(
        &self,
        map: *mut nixl_capi_notif_map_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_create_notif_map
                .as_ref()
                .expect("Expected function, got error."))(map)
        }
    }
    pub unsafe fn nixl_capi_destroy_notif_map(
        &self,
        map: nixl_capi_notif_map_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_destroy_notif_map
                .as_ref()
                .expect("Expected function, got error."))(map)
        }
    }
    pub unsafe fn nixl_capi_notif_map_size(
        &self,
        map: nixl_capi_notif_map_t,
        size: *mut usize,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_notif_map_size
                .as_ref()
                .expect("Expected function, got error."))(map, size)
        }
    }
    pub unsafe fn nixl_capi_notif_map_get_agent_at(
        &self,
        map: nixl_capi_notif_map_t,
        index: usize,
        agent_name: *mut *const ::core::ffi::c_char,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_notif_map_get_agent_at
                .as_ref()
                .expect("Expected function, got error."))(map, index, agent_name)
        }
    }
    pub unsafe fn nixl_capi_notif_map_get_notifs_size(
        &self,
        map: nixl_capi_notif_map_t,
        agent_name: *const ::core::ffi::c_char,
        size: *mut usize,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_notif_map_get_notifs_size
                .as_ref()
                .expect("Expected function, got error."))(map, agent_name, size)
        }
    }
    pub unsafe fn nixl_capi_notif_map_get_notif(
        &self,
        map: nixl_capi_notif_map_t,
        agent_name: *const ::core::ffi::c_char,
        index: usize,
        data: *mut *const ::core::ffi::c_void,
        len: *mut usize,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_notif_map_get_notif
                .as_ref()
                .expect("Expected function, got error."))(
                map, agent_name, index, data, len
            )
        }
    }
    pub unsafe fn nixl_capi_notif_map_clear(
        &self,
        map: nixl_capi_notif_map_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self
                .nixl_capi_notif_map_clear
                .as_ref()
                .expect("Expected function, got error."))(map)
        }
    }
}
