//! Nodes and a router as child processes, on ports of their own, for the demo, the bench and the replay.
//! They die with this process, and no wait for them is without an end.

use std::env;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, bounded};
use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};
use serde::Deserialize;
use thiserror::Error;

/// Tells a child who its parent is.
const PARENT_VARIABLE: &str = "KVX_PARENT_PID";
/// Time for a node to load its model, allocate its pool and start NIXL, on a slow and busy machine.
const START_LIMIT: Duration = Duration::from_secs(120);
/// Time for a node to end by itself before it is killed.
const END_LIMIT: Duration = Duration::from_secs(8);
/// Longest line of a child's output that is looked at, bytes.
const MAX_LINE: u64 = 1 << 16;

/// Why a process of the cluster is not there.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ClusterError {
    /// This program's own file is not known.
    #[error("cannot find this program's own file: {0}")]
    SelfUnknown(#[source] io::Error),
    /// It could not be started.
    #[error("cannot start the {role} process: {source}")]
    Spawn {
        /// Which process.
        role: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It ended before it was ready.
    #[error("the {role} process ended before it was ready ({how}); its last words are above")]
    Ended {
        /// Which process.
        role: String,
        /// Its exit status, as text.
        how: String,
    },
    /// It did not become ready in time.
    #[error("the {role} process was not ready within {waited:?}")]
    NotReady {
        /// Which process.
        role: String,
        /// How long was waited.
        waited: Duration,
    },
}

/// To be called first thing in a process that another one may have started: from now on it is asked to
/// end when its parent ends. Does nothing in a process that a person has started. False when the
/// parent is gone already.
#[must_use]
pub fn end_with_parent() -> bool {
    let parent = env::var(PARENT_VARIABLE).ok();
    let Some(parent) = parent
        .and_then(|text| text.parse().ok())
        .and_then(Pid::from_raw)
    else {
        return true;
    };
    // Without it the process outlives a parent that is killed, and no more.
    let _ = set_parent_process_death_signal(Some(Signal::TERM));
    getppid() == Some(parent)
}

/// This program's own file.
///
/// # Errors
/// [`ClusterError::SelfUnknown`].
pub fn this_program() -> Result<PathBuf, ClusterError> {
    env::current_exe().map_err(ClusterError::SelfUnknown)
}

/// What a process says when it can be used.
#[derive(Debug, Clone, Deserialize)]
struct Ready {
    ready: bool,
    http: String,
}

/// A process that serves HTTP. Dropping it ends it.
#[derive(Debug)]
pub struct Served {
    role: String,
    child: Child,
    http: String,
}

impl Served {
    /// Starts `program` with `arguments` and waits until it is ready. To be called on a thread that
    /// lives as long as the child: the child ends with it.
    ///
    /// # Errors
    /// [`ClusterError`].
    pub fn start(program: &Path, role: &str, arguments: &[String]) -> Result<Self, ClusterError> {
        Self::launch(program, role, arguments)?.ready()
    }

    /// Starts it without waiting, so that several can start at once.
    ///
    /// # Errors
    /// [`ClusterError`].
    pub fn launch(
        program: &Path,
        role: &str,
        arguments: &[String],
    ) -> Result<Starting, ClusterError> {
        let mut child = Command::new(program)
            .args(arguments)
            .env(PARENT_VARIABLE, std::process::id().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|source| ClusterError::Spawn {
                role: role.to_owned(),
                source,
            })?;
        let (sender, lines) = bounded(1);
        if let Some(output) = child.stdout.take() {
            // Ends with the child's output.
            thread::spawn(move || {
                let mut output = BufReader::new(output);
                loop {
                    let mut line = String::new();
                    match output.by_ref().take(MAX_LINE).read_line(&mut line) {
                        Ok(0) | Err(_) => return,
                        // Only the first report counts; the rest is read so that nobody blocks.
                        Ok(_) => {
                            if let Ok(ready) = serde_json::from_str::<Ready>(&line) {
                                let _ = sender.try_send(ready);
                            }
                        }
                    }
                }
            });
        }
        Ok(Starting {
            served: Self {
                role: role.to_owned(),
                child,
                http: String::new(),
            },
            lines,
        })
    }

    /// Its base URL.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.http)
    }

    /// Its process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Kills it at once, without any chance to tidy up, as a crash would.
    pub fn kill(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Ok(pid) = i32::try_from(self.child.id())
            && matches!(self.child.try_wait(), Ok(None))
            && let Some(pid) = Pid::from_raw(pid)
        {
            let _ = kill_process(pid, Signal::TERM);
            let end = Instant::now() + END_LIMIT;
            while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < end {
                thread::sleep(Duration::from_millis(10));
            }
        }
        self.kill();
    }
}

/// A process that has been started and is not ready yet.
#[derive(Debug)]
pub struct Starting {
    served: Served,
    lines: Receiver<Ready>,
}

impl Starting {
    /// Waits until it is ready.
    ///
    /// # Errors
    /// [`ClusterError`].
    pub fn ready(mut self) -> Result<Served, ClusterError> {
        let role = self.served.role.clone();
        match self.lines.recv_timeout(START_LIMIT) {
            Ok(ready) if ready.ready => {
                self.served.http = ready.http;
                Ok(self.served)
            }
            Ok(_) | Err(RecvTimeoutError::Timeout) => Err(ClusterError::NotReady {
                role,
                waited: START_LIMIT,
            }),
            Err(RecvTimeoutError::Disconnected) => {
                let how = match self.served.child.wait() {
                    Ok(status) => status.to_string(),
                    Err(error) => error.to_string(),
                };
                Err(ClusterError::Ended { role, how })
            }
        }
    }
}

/// How a cluster is set up.
#[derive(Debug, Clone)]
pub struct ClusterSpec {
    /// The program that has the subcommands `prefill`, `decode` and `router`.
    pub program: PathBuf,
    /// Prefill nodes.
    pub prefill: usize,
    /// Decode nodes.
    pub decode: usize,
    /// Whether decode nodes offer their blocks to the next turn.
    pub bidirectional: bool,
    /// Memory of each node's pool, MiB.
    pub kv_cache_mib: u64,
    /// Further arguments for every node.
    pub node_arguments: Vec<String>,
    /// Further arguments for the router.
    pub router_arguments: Vec<String>,
}

/// A router, its prefill and its decode nodes, in that order of ending.
#[derive(Debug)]
pub struct Cluster {
    /// The router.
    pub router: Served,
    /// Prefill nodes.
    pub prefill: Vec<Served>,
    /// Decode nodes.
    pub decode: Vec<Served>,
}

impl Cluster {
    /// Starts all of them.
    ///
    /// # Errors
    /// [`ClusterError`] of the first that did not start; the others are ended.
    pub fn start(spec: &ClusterSpec) -> Result<Self, ClusterError> {
        let launch = |role: &str, count: usize| -> Result<Vec<Starting>, ClusterError> {
            (0..count).map(|n| Self::node(spec, role, n)).collect()
        };
        let (prefill, decode) = (
            launch("prefill", spec.prefill)?,
            launch("decode", spec.decode)?,
        );
        let wait = |nodes: Vec<Starting>| -> Result<Vec<Served>, ClusterError> {
            nodes.into_iter().map(Starting::ready).collect()
        };
        let (prefill, decode) = (wait(prefill)?, wait(decode)?);
        let router = Self::router(spec, &prefill, &decode, 0)?;
        Ok(Self {
            router,
            prefill,
            decode,
        })
    }

    /// Starts a router for nodes that run; port 0 takes any.
    ///
    /// # Errors
    /// [`ClusterError`].
    pub fn router(
        spec: &ClusterSpec,
        prefill: &[Served],
        decode: &[Served],
        port: u16,
    ) -> Result<Served, ClusterError> {
        let mut arguments = vec!["router".to_owned(), "--port".into(), port.to_string()];
        for (flag, nodes) in [("--prefill", prefill), ("--decode", decode)] {
            for node in nodes {
                arguments.extend([flag.to_owned(), node.url()]);
            }
        }
        if !spec.bidirectional {
            arguments.push("--no-bidirectional".into());
        }
        arguments.extend(spec.router_arguments.iter().cloned());
        Served::start(&spec.program, "router", &arguments)
    }

    /// Starts one more node of a role, under the name and with the arguments that the others have.
    ///
    /// # Errors
    /// [`ClusterError`].
    pub fn node(spec: &ClusterSpec, role: &str, number: usize) -> Result<Starting, ClusterError> {
        let mut arguments = vec![
            role.to_owned(),
            "--port".into(),
            "0".into(),
            "--side-channel-port".into(),
            "0".into(),
            "--engine-id".into(),
            format!("{role}-{number}"),
            "--bidirectional-kv-xfer".into(),
            spec.bidirectional.to_string(),
            "--kv-cache-mib".into(),
            spec.kv_cache_mib.to_string(),
        ];
        arguments.extend(spec.node_arguments.iter().cloned());
        Served::launch(&spec.program, &format!("{role}-{number}"), &arguments)
    }
}
