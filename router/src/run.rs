//! The router as a process of its own.

use std::io::Write;
use std::time::Duration;

use serde_json::json;

use crate::config::RouterArgs;
use crate::{Router, StartError};

/// Why a router process ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// It did not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The process lacks what it needs from its system.
    #[error("{0}")]
    System(#[from] std::io::Error),
}

/// What ended a router process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// SIGTERM.
    Terminated,
    /// Ctrl-C.
    Interrupted,
}

/// Runs a router until SIGTERM or Ctrl-C. Prints one line of JSON to stdout when it listens:
/// `{"ready":true,"http":"127.0.0.1:8000"}`.
///
/// When asked to end it takes no more requests and lets answers under way go on for the time that
/// `--grace` says; a second Ctrl-C ends it at once.
pub fn run(args: &RouterArgs) -> Result<Ended, RunError> {
    let config = args.config().map_err(StartError::from)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let ended = runtime.block_on(async {
        let mut signals = Signals::new()?;
        let router = Router::start(config).await?;
        let ready = json!({"ready": true, "http": router.addr.to_string()});
        let mut stdout = std::io::stdout();
        // Whoever closed stdout does not want to know.
        let _ = writeln!(stdout, "{ready}").and_then(|()| stdout.flush());
        let ended = signals.next().await;
        tokio::select! {
            () = router.shutdown() => {}
            _ = signals.next() => {}
        }
        Ok(ended)
    });
    // What still runs was told to end, or is not waited for.
    runtime.shutdown_timeout(Duration::from_millis(100));
    ended
}

#[cfg(unix)]
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    async fn next(&mut self) -> Ended {
        tokio::select! {
            _ = self.interrupt.recv() => Ended::Interrupted,
            _ = self.terminate.recv() => Ended::Terminated,
        }
    }
}

#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self)
    }

    async fn next(&mut self) -> Ended {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
        Ended::Interrupted
    }
}
