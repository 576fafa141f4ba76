//! Every method calls its function, and turns results and statuses into Rust.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests"
)]

mod common;

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char};

use common::fake::{Fake, Installation, declarations};
use nixl_sys::*;

/// Every handle a fake hands out; it never looks at them.
struct Handles {
    agent: AgentHandle,
    backend: BackendHandle,
    mems: MemListHandle,
    view: MemViewHandle,
    map: NotifMapHandle,
    args: OptArgsHandle,
    iter: ParamIterHandle,
    params: ParamsHandle,
    answers: QueryRespListHandle,
    reg: RegDlistHandle,
    remote: RemoteDlistHandle,
    strings: StringListHandle,
    xfer: XferDlistHandle,
    prepared: PreparedDlistHandle,
    req: XferReqHandle,
}

impl Handles {
    fn from(library: &Library) -> Self {
        // SAFETY: a fake hands out the same live object for everything and reads none.
        unsafe {
            let agent = library.create_agent(c"a").unwrap();
            let params = library.create_params().unwrap();
            let xfer = library.create_xfer_dlist(MemoryType::Dram).unwrap();
            let prepared = library.prep_xfer_dlist(agent, c"", xfer, None).unwrap();
            Self {
                agent,
                params,
                xfer,
                prepared,
                backend: library.create_backend(agent, c"UCX", params).unwrap(),
                mems: library.get_plugin_params(agent, c"UCX").unwrap().0,
                view: library.prep_mem_view_local(agent, xfer, None).unwrap(),
                map: library.create_notif_map().unwrap(),
                args: library.create_opt_args().unwrap(),
                iter: library.params_create_iterator(params).unwrap(),
                answers: library.create_query_resp_list().unwrap(),
                reg: library.create_reg_dlist(MemoryType::Dram).unwrap(),
                remote: library.create_remote_dlist(MemoryType::Dram).unwrap(),
                strings: library.get_available_plugins(agent).unwrap(),
                req: library
                    .make_xfer_req(agent, XferOp::Read, prepared, &[0], prepared, &[0], None)
                    .unwrap(),
            }
        }
    }
}

fn last_call(fake: &Installation) -> String {
    // SAFETY: the library is loaded already, and the fake has this function of this type.
    unsafe {
        let library = libloading::Library::new(fake.library()).unwrap();
        let last_call = library
            .get::<unsafe extern "C" fn() -> *const c_char>(b"fake_last_call\0")
            .unwrap();
        CStr::from_ptr(last_call()).to_str().unwrap().to_owned()
    }
}

trait Bytes {
    fn bytes(&self) -> &[u8];
}

impl Bytes for Buffer {
    fn bytes(&self) -> &[u8] {
        self
    }
}

impl Bytes for Option<Buffer> {
    fn bytes(&self) -> &[u8] {
        self.as_deref().unwrap()
    }
}

impl Bytes for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }
}

impl Bytes for CString {
    fn bytes(&self) -> &[u8] {
        self.as_bytes()
    }
}

#[test]
fn a_library_and_its_handles_may_change_threads() {
    fn shared<T: Send + Sync + 'static>() {}
    shared::<Library>();
    shared::<AgentHandle>();
    shared::<Buffer>();
    shared::<CallError>();
    shared::<LoadError>();
}

#[test]
fn the_lists_of_functions_are_those_of_the_header() {
    let header: BTreeSet<String> = declarations().into_iter().map(|d| d.name).collect();
    let lists: BTreeSet<String> = REQUIRED_FUNCTIONS
        .iter()
        .chain(FUNCTIONS_SINCE_1_5)
        .map(|f| (*f).to_owned())
        .collect();
    assert_eq!(header, lists);
    assert_eq!(
        (REQUIRED_FUNCTIONS.len(), FUNCTIONS_SINCE_1_5.len()),
        (96, 8)
    );
}

#[test]
fn every_method_calls_its_function_and_reads_its_results() {
    let fake = Fake::complete().install();
    let l = Library::open(&fake.library()).unwrap();
    let h = Handles::from(&l);
    let mut called = BTreeSet::new();

    macro_rules! calls {
        ($($method:ident($($arg:expr),*) => $expected:pat,)*) => {$(
            // SAFETY: the handles are live, and a fake reads none.
            let result = unsafe { l.$method($($arg),*) };
            assert!(matches!(result, Ok($expected)), "{}: {result:?}", stringify!($method));
            let function = last_call(&fake);
            assert_eq!(function, concat!("nixl_capi_", stringify!($method)));
            called.insert(function);
        )*};
    }

    assert_eq!(l.is_stub(), Ok(false));
    called.insert(last_call(&fake));
    let number = 4_usize;
    calls! {
        create_agent(c"a") => AgentHandle { .. },
        create_configured_agent(c"a", &AgentConfig::default()) => AgentHandle { .. },
        destroy_agent(h.agent) => (),
        invalidate_remote_md(h.agent, c"p") => (),
        check_remote_md(h.agent, c"p", Some(h.xfer)) => (),
        send_local_md(h.agent, Some(h.args)) => (),
        send_local_partial_md(h.agent, h.reg, None) => (),
        fetch_remote_md(h.agent, c"p", None) => Progress::Done,
        invalidate_local_md(h.agent, None) => (),
        agent_make_connection(h.agent, c"p", None) => Progress::Done,
        get_available_plugins(h.agent) => StringListHandle { .. },
        get_plugin_params(h.agent, c"UCX") => (MemListHandle { .. }, ParamsHandle { .. }),
        create_backend(h.agent, c"UCX", h.params) => BackendHandle { .. },
        get_backend_params(h.agent, h.backend) => (MemListHandle { .. }, ParamsHandle { .. }),
        destroy_backend(h.backend) => (),
        string_list_size(h.strings) => 4,
        destroy_string_list(h.strings) => (),
        mem_list_is_empty(h.mems) => true,
        mem_list_size(h.mems) => 4,
        mem_list_get(h.mems, 0) => MemoryType::Vram,
        destroy_mem_list(h.mems) => (),
        create_params() => ParamsHandle { .. },
        params_add(h.params, c"k", c"v") => (),
        params_is_empty(h.params) => true,
        params_create_iterator(h.params) => ParamIterHandle { .. },
        params_destroy_iterator(h.iter) => (),
        params_iterator_next(h.iter) => Some(_),
        destroy_params(h.params) => (),
        create_opt_args() => OptArgsHandle { .. },
        destroy_opt_args(h.args) => (),
        opt_args_add_backend(h.args, h.backend) => (),
        opt_args_set_notif_msg(h.args, b"m") => (),
        opt_args_set_has_notif(h.args, true) => (),
        opt_args_get_has_notif(h.args) => true,
        opt_args_set_skip_desc_merge(h.args, true) => (),
        opt_args_get_skip_desc_merge(h.args) => true,
        opt_args_set_ip_addr(h.args, c"::1") => (),
        opt_args_set_port(h.args, 1) => (),
        opt_args_set_custom_param(h.args, b"p") => (),
        create_xfer_dlist(MemoryType::Vram) => XferDlistHandle { .. },
        destroy_xfer_dlist(h.xfer) => (),
        xfer_dlist_get_type(h.xfer) => MemoryType::Vram,
        xfer_dlist_add_desc(h.xfer, 1, 2, 3) => (),
        xfer_dlist_desc_count(h.xfer) => 4,
        xfer_dlist_len(h.xfer) => 4,
        xfer_dlist_is_empty(h.xfer) => true,
        xfer_dlist_trim(h.xfer) => (),
        xfer_dlist_rem_desc(h.xfer, 0) => (),
        xfer_dlist_clear(h.xfer) => (),
        xfer_dlist_resize(h.xfer, number) => (),
        xfer_dlist_print(h.xfer) => (),
        create_reg_dlist(MemoryType::Dram) => RegDlistHandle { .. },
        destroy_reg_dlist(h.reg) => (),
        reg_dlist_get_type(h.reg) => MemoryType::Vram,
        reg_dlist_add_desc(h.reg, 1, 2, 3, &[]) => (),
        reg_dlist_desc_count(h.reg) => 4,
        reg_dlist_is_empty(h.reg) => true,
        reg_dlist_trim(h.reg) => (),
        reg_dlist_rem_desc(h.reg, 0) => (),
        reg_dlist_clear(h.reg) => (),
        reg_dlist_resize(h.reg, number) => (),
        reg_dlist_print(h.reg) => (),
        create_remote_dlist(MemoryType::Dram) => RemoteDlistHandle { .. },
        destroy_remote_dlist(h.remote) => (),
        remote_dlist_add_desc(h.remote, 1, 2, 3, None) => (),
        register_mem(h.agent, h.reg, None) => (),
        deregister_mem(h.agent, h.reg, None) => (),
        query_mem(h.agent, h.reg, h.answers, None) => (),
        create_query_resp_list() => QueryRespListHandle { .. },
        destroy_query_resp_list(h.answers) => (),
        query_resp_list_size(h.answers) => 4,
        query_resp_list_has_value(h.answers, 0) => true,
        query_resp_list_get_params(h.answers, 0) => ParamsHandle { .. },
        prep_mem_view_local(h.agent, h.xfer, None) => MemViewHandle { .. },
        prep_mem_view_remote(h.agent, h.remote, None) => MemViewHandle { .. },
        release_mem_view(h.agent, h.view) => (),
        prep_xfer_dlist(h.agent, c"p", h.xfer, None) => PreparedDlistHandle { .. },
        release_xfer_dlist_handle(h.agent, h.prepared) => (),
        make_xfer_req(h.agent, XferOp::Read, h.prepared, &[0], h.prepared, &[0], None) => XferReqHandle { .. },
        create_xfer_req(h.agent, XferOp::Write, h.xfer, h.xfer, c"p", None) => XferReqHandle { .. },
        estimate_xfer_cost(h.agent, h.req, None) => CostEstimate { duration_us: 4, error_margin_us: 4, method: 4 },
        post_xfer_req(h.agent, h.req, None) => Progress::Done,
        get_xfer_status(h.agent, h.req) => Progress::Done,
        query_xfer_backend(h.agent, h.req) => BackendHandle { .. },
        get_xfer_telemetry(h.agent, h.req) =>
            XferTelemetry { started_us: 1, post_us: 2, transfer_us: 3, bytes: 4, descriptors: 5 },
        release_xfer_req(h.agent, h.req) => (),
        destroy_xfer_req(h.req) => (),
        gen_notif(h.agent, c"p", b"m", None) => Progress::Done,
        get_notifs(h.agent, h.map, None) => (),
        create_notif_map() => NotifMapHandle { .. },
        destroy_notif_map(h.map) => (),
        notif_map_size(h.map) => 4,
        notif_map_get_notifs_size(h.map, c"p") => 4,
        notif_map_clear(h.map) => (),
    }

    // Buffers are four bytes long, strings end with NUL.
    macro_rules! gives_text {
        ($($method:ident($($arg:expr),*),)*) => {$(
            // SAFETY: as above.
            let result = unsafe { l.$method($($arg),*) }.unwrap();
            assert_eq!(result.bytes(), b"text", "{}", stringify!($method));
            let function = last_call(&fake);
            assert_eq!(function, concat!("nixl_capi_", stringify!($method)));
            called.insert(function);
        )*};
    }
    gives_text! {
        get_local_md(h.agent),
        get_local_partial_md(h.agent, h.reg, None),
        load_remote_md(h.agent, b"metadata"),
        string_list_get(h.strings, 0),
        mem_type_to_string(MemoryType::Dram),
        opt_args_get_notif_msg(h.args),
        opt_args_get_custom_param(h.args),
        notif_map_get_agent_at(h.map, 3),
        notif_map_get_notif(h.map, c"p", 0),
    }

    let all: BTreeSet<String> = declarations().into_iter().map(|d| d.name).collect();
    assert_eq!(called, all);
}

#[test]
fn functions_that_are_missing_are_named_when_called() {
    let fake = Fake::complete().without(FUNCTIONS_SINCE_1_5).install();
    let library = Library::open(&fake.library()).unwrap();
    // SAFETY: a fake reads nothing.
    let error = unsafe { library.create_remote_dlist(MemoryType::Dram) }.unwrap_err();
    assert_eq!(
        error,
        CallError::Unsupported {
            function: "nixl_capi_create_remote_dlist",
            since: "1.5"
        }
    );
    assert_eq!((error.status(), error.raw()), (None, None));
    assert!(error.to_string().contains("NIXL 1.5 or newer"));
}

#[test]
fn success_without_a_result_is_an_error() {
    let fake = Fake::complete()
        .with("nixl_capi_create_params", "nixl_capi_status_t nixl_capi_create_params(nixl_capi_params_t *p) { return 0; }")
        .with(
            "nixl_capi_load_remote_md",
            "nixl_capi_status_t nixl_capi_load_remote_md(nixl_capi_agent_t a, const void *d, size_t l, char **n) { return 0; }",
        )
        .install();
    let library = Library::open(&fake.library()).unwrap();
    // SAFETY: a fake reads nothing.
    unsafe {
        let no_result = |function| CallError::NoResult { function };
        assert_eq!(
            library.create_params(),
            Err(no_result("nixl_capi_create_params"))
        );
        let agent = library.create_agent(c"a").unwrap();
        assert_eq!(
            library.load_remote_md(agent, b"m"),
            Err(no_result("nixl_capi_load_remote_md"))
        );
    }
}

#[test]
fn the_end_of_parameters_is_told_from_the_last_pair() {
    let fake = Fake::complete()
        .with(
            "nixl_capi_params_iterator_next",
            r#"nixl_capi_status_t nixl_capi_params_iterator_next(
                nixl_capi_param_iter_t i, const char **key, const char **value, bool *has_next) {
                static int step = 0;
                if (step < 2) { *key = "key"; *value = step ? "" : "first"; }
                *has_next = ++step < 2;
                return 0;
            }"#,
        )
        .install();
    let library = Library::open(&fake.library()).unwrap();
    // SAFETY: a fake reads nothing.
    unsafe {
        let iter = library
            .params_create_iterator(library.create_params().unwrap())
            .unwrap();
        assert_eq!(
            library.params_iterator_next(iter),
            Ok(Some((c"key".into(), c"first".into())))
        );
        assert_eq!(
            library.params_iterator_next(iter),
            Ok(Some((c"key".into(), c"".into())))
        );
        assert_eq!(library.params_iterator_next(iter), Ok(None));
    }
}

#[test]
fn an_index_past_the_senders_never_reaches_the_library() {
    let fake = Fake::complete().install();
    let library = Library::open(&fake.library()).unwrap();
    // SAFETY: a fake reads nothing.
    let error = unsafe {
        let map = library.create_notif_map().unwrap();
        library.notif_map_get_agent_at(map, 4)
    };
    assert!(
        matches!(
            error,
            Err(CallError::BadArgument {
                argument: "index",
                ..
            })
        ),
        "{error:?}"
    );
    assert_eq!(last_call(&fake), "nixl_capi_notif_map_size");
}

#[test]
fn a_string_with_nul_is_refused() {
    assert_eq!(c_string("agent name", "fine"), Ok(c"fine".into()));
    let error = c_string("agent name", "a\0b").unwrap_err();
    assert_eq!(error.to_string(), "bad agent name: it has a NUL byte at 1");
}
