//! Runs what the command line asks for.

use std::fmt::Display;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_xfer::transport::nixl::BackendConfig;
use kvx::cli::Exit;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::cli::{NodeArgs, SettingsError};
use crate::http::{self, App};
use crate::model::Loaded;
use crate::node::{Node, NodeError, Role};
use crate::provision;

/// Time that a node's thread has to end; with the connections it is less than five seconds.
const END: Duration = Duration::from_millis(4000);
/// Time that connections have to end, once the node has.
const CONNECTIONS: Duration = Duration::from_millis(500);

/// Serves as a node until it is told to end.
#[must_use]
pub fn node(role: Role, args: &NodeArgs) -> Exit {
    let settings = match args.settings(role) {
        Ok(settings) => settings,
        Err(
            error @ (SettingsError::Host { .. }
            | SettingsError::Name(_)
            | SettingsError::OnGpu { .. }),
        ) => return failed(Exit::Usage, &error),
        Err(error) => return failed(Exit::Environment, &error),
    };
    let path = match args.model.clone().map_or_else(provision::model, Ok) {
        Ok(path) => path,
        Err(error) => return failed(Exit::Environment, &error),
    };
    let begin = Instant::now();
    let loaded = match Loaded::open(&path) {
        Ok(loaded) => Arc::new(loaded),
        Err(error) => return failed(Exit::Environment, &error),
    };
    tracing::info!(took = ?begin.elapsed(), "the model is loaded");
    let transport = match kvx::runtime::open(BackendConfig::default()) {
        Ok(transport) => transport,
        Err(error) => return failed(Exit::Environment, &error),
    };
    let node = match Node::start(&settings, loaded, transport) {
        Ok(node) => Arc::new(node),
        Err(error @ (NodeError::SmallCache { .. } | NodeError::Model(_))) => {
            return failed(Exit::Usage, &error);
        }
        Err(error) => return failed(Exit::Environment, &error),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return failed(Exit::Environment, &error),
    };
    let served = runtime.block_on(serve(role, args, settings.engine_id.as_str(), &node));
    runtime.shutdown_timeout(CONNECTIONS);
    match served {
        Ok(()) => Exit::Ok,
        Err(error) => failed(Exit::Environment, &error),
    }
}

/// Prints the path of the model's file.
#[must_use]
pub fn model_path() -> Exit {
    match provision::model() {
        Ok(path) => {
            println!("{}", path.display());
            Exit::Ok
        }
        Err(error) => failed(Exit::Environment, &error),
    }
}

fn failed(exit: Exit, error: &dyn Display) -> Exit {
    eprintln!("serving: {error}");
    exit
}

async fn serve(
    role: Role,
    args: &NodeArgs,
    engine_id: &str,
    node: &Arc<Node>,
) -> std::io::Result<()> {
    // Before anybody is told that the node is ready: a signal must not find the default action.
    let (mut terminate, mut interrupt) = (
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
    );
    let listener = TcpListener::bind(args.http(role)).await?;
    let ready = json!({
        "ready": true,
        "role": role.as_str(),
        "http": listener.local_addr()?.to_string(),
        "side_channel": node.side_channel().map(ToString::to_string),
        "engine_id": engine_id,
        "model": args.served_model_name,
    });
    let mut stdout = std::io::stdout();
    writeln!(stdout, "{ready}")?;
    stdout.flush()?;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let app = App::new(
        Arc::clone(node),
        args.served_model_name.clone(),
        args.patience(),
    );
    let server = tokio::spawn(http::serve(listener, app, async {
        let _ = stopped.await;
    }));
    told(&mut terminate, &mut interrupt).await;
    tracing::info!("ending");
    let begin = Instant::now();
    let _ = stop.send(());
    let ending = Arc::clone(node);
    let ended = tokio::task::spawn_blocking(move || ending.shutdown(END)).await;
    if !ended.unwrap_or(false) {
        tracing::warn!(after = ?begin.elapsed(), "the engine thread did not end in time");
    }
    // Connections that are kept open by their clients end with the process.
    match tokio::time::timeout(CONNECTIONS, server).await {
        Ok(Err(panicked)) => Err(std::io::Error::other(panicked)),
        Ok(Ok(())) | Err(_) => Ok(()),
    }
}

async fn told(terminate: &mut Signal, interrupt: &mut Signal) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}
