//! Loads NIXL from the place given, prints what was found, and tries the first steps of every program.

use std::ffi::CString;
use std::path::Path;
use std::process::ExitCode;

use nixl_sys::{AgentConfig, Environment, Library, MemoryType, find_in};

type AnyError = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    // SAFETY: no other thread has been started.
    let environment = unsafe { Environment::recommended().apply() };
    print!("{environment}");
    match std::env::args_os()
        .nth(1)
        .map(|place| run(Path::new(&place)))
    {
        None => {
            eprintln!("usage: load_report PLACE-WITH-NIXL");
            ExitCode::FAILURE
        }
        Some(Ok(())) => ExitCode::SUCCESS,
        Some(Err(error)) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(place: &Path) -> Result<(), AnyError> {
    let library = Library::open(&find_in(place)?)?;
    print!("{}", library.report());
    // SAFETY: one thread; every handle is used before it is destroyed, and `memory` outlives its registration.
    unsafe {
        let agent = library.create_configured_agent(c"example", &AgentConfig::default())?;
        println!(
            "plugins found by the agent: {}",
            plugins(&library, agent)?.join(", ")
        );

        let params = library.create_params()?;
        let backend = library.create_backend(agent, c"UCX", params)?;
        library.destroy_params(params)?;

        let memory = vec![0_u8; 1 << 20];
        let list = library.create_reg_dlist(MemoryType::Dram)?;
        library.reg_dlist_add_desc(list, memory.as_ptr().addr(), memory.len(), 0, &[])?;
        library.register_mem(agent, list, None)?;
        println!("metadata: {} bytes", library.get_local_md(agent)?.len());

        library.deregister_mem(agent, list, None)?;
        library.destroy_reg_dlist(list)?;
        library.destroy_backend(backend)?;
        library.destroy_agent(agent)?;
    }
    Ok(())
}

/// # Safety
///
/// `agent` is live.
unsafe fn plugins(
    library: &Library,
    agent: nixl_sys::AgentHandle,
) -> Result<Vec<String>, AnyError> {
    // SAFETY: the caller's promise; the list is destroyed last.
    unsafe {
        let list = library.get_available_plugins(agent)?;
        let names: Result<Vec<CString>, _> = (0..library.string_list_size(list)?)
            .map(|i| library.string_list_get(list, i))
            .collect();
        library.destroy_string_list(list)?;
        Ok(names?
            .into_iter()
            .map(|n| n.to_string_lossy().into_owned())
            .collect())
    }
}
