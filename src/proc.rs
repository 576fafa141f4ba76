//! Child processes and the line protocol to them. A child dies with its parent, a parent never waits
//! without an end for a child, and Ctrl-C reaches the parent alone, which then ends its children.

use std::env;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, bounded};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

/// What a protocol line begins with. Anything else on the pipe was printed by some library.
const MARK: &str = "kvx1 ";
/// Longest accepted line, bytes: a description of some 100,000 scattered pieces.
const MAX_LINE_BYTES: u64 = 16 << 20;
/// How often a wait looks whether it was interrupted.
const SLICE: Duration = Duration::from_millis(50);
/// Tells a child who its parent is.
const PARENT_VARIABLE: &str = "KVX_PARENT_PID";

/// Why talking to another process failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ProcError {
    /// It could not be started.
    #[error("cannot start the {role} process: {source}")]
    Spawn {
        /// Which process.
        role: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It ended, or was killed.
    #[error("the {role} process ended too early ({how}); its last words are above")]
    Ended {
        /// Which process.
        role: String,
        /// Its exit status, as text.
        how: String,
    },
    /// It did not answer in time.
    #[error("the {role} process did not answer within {waited:?}")]
    Timeout {
        /// Which process.
        role: String,
        /// How long was waited.
        waited: Duration,
    },
    /// It said something else than was expected.
    #[error("the {role} process said something unexpected: {text}")]
    Unexpected {
        /// Which process.
        role: String,
        /// What, cut to a readable length.
        text: String,
    },
    /// Ctrl-C.
    #[error("interrupted")]
    Interrupted,
    /// A pipe broke.
    #[error("the pipe to the {role} process broke: {source}")]
    Pipe {
        /// Which process.
        role: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Whether Ctrl-C was pressed.
#[derive(Debug, Clone, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Catches Ctrl-C and termination from now on; once per process.
    ///
    /// # Errors
    /// [`ctrlc::Error`] when a handler is installed already.
    pub fn install() -> Result<Self, ctrlc::Error> {
        let interrupt = Self::default();
        let flag = Arc::clone(&interrupt.0);
        ctrlc::set_handler(move || flag.store(true, Ordering::SeqCst))?;
        Ok(interrupt)
    }

    /// Acts as if it had been pressed.
    pub fn raise(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Whether it was pressed.
    #[must_use]
    pub fn is_raised(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// A child process. Dropping it kills it.
#[derive(Debug)]
pub struct Worker {
    role: String,
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<Line>,
    interrupt: Interrupt,
}

#[derive(Debug)]
enum Line {
    Message(String),
    Broken(io::Error),
}

impl Worker {
    /// Starts this program again with `arguments` and additional environment variables. Must be called on a thread that lives as long as
    /// the child: the child dies with it.
    ///
    /// # Errors
    /// [`ProcError::Spawn`].
    pub fn spawn_self(
        role: &str,
        arguments: &[&str],
        variables: &[(String, String)],
        interrupt: &Interrupt,
    ) -> Result<Self, ProcError> {
        let spawn = |source| ProcError::Spawn {
            role: role.to_owned(),
            source,
        };
        let mut command = Command::new(env::current_exe().map_err(spawn)?);
        command
            .args(arguments)
            .envs(variables.iter().map(|(name, value)| (name, value)));
        Self::spawn(role, command, interrupt)
    }

    /// Starts any program that speaks the line protocol. To be called on such a thread, too.
    ///
    /// # Errors
    /// [`ProcError::Spawn`].
    pub fn spawn(
        role: &str,
        mut command: Command,
        interrupt: &Interrupt,
    ) -> Result<Self, ProcError> {
        let spawn = |source| ProcError::Spawn {
            role: role.to_owned(),
            source,
        };
        let mut child = command
            .env(PARENT_VARIABLE, std::process::id().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A group of its own: Ctrl-C in a terminal goes to the whole group of the parent.
            .process_group(0)
            .spawn()
            .map_err(spawn)?;
        let input = child.stdin.take();
        // A few lines: a child that says more than is asked for waits.
        let (sender, lines) = bounded(16);
        let output = child.stdout.take();
        let worker = Self {
            role: role.to_owned(),
            child,
            input,
            lines,
            interrupt: interrupt.clone(),
        };
        let name = role.to_owned();
        if let Some(output) = output {
            thread::Builder::new()
                .name(format!("{role}-pipe"))
                .spawn(move || forward(&name, output, &sender))
                .map_err(spawn)?;
        }
        Ok(worker)
    }

    /// The child's process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a message.
    ///
    /// # Errors
    /// [`ProcError`] when the child is gone.
    pub fn send(&mut self, message: &impl Serialize) -> Result<(), ProcError> {
        let sent = match &mut self.input {
            Some(input) => write_line(input, message),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        };
        sent.map_err(|source| match source.kind() {
            io::ErrorKind::BrokenPipe => self.ended(),
            _ => ProcError::Pipe {
                role: self.role.clone(),
                source,
            },
        })
    }

    /// Waits for the next message, `limit` at most.
    ///
    /// # Errors
    /// [`ProcError`] when the child is gone, silent or says nonsense, and at Ctrl-C.
    pub fn recv<T: DeserializeOwned>(&mut self, limit: Duration) -> Result<T, ProcError> {
        let end = Instant::now() + limit;
        loop {
            if self.interrupt.is_raised() {
                return Err(ProcError::Interrupted);
            }
            let left = end.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left.min(SLICE)) {
                Ok(Line::Message(text)) => {
                    return serde_json::from_str(&text).map_err(|_| ProcError::Unexpected {
                        role: self.role.clone(),
                        text: text.chars().take(300).collect(),
                    });
                }
                Ok(Line::Broken(source)) => {
                    return Err(ProcError::Pipe {
                        role: self.role.clone(),
                        source,
                    });
                }
                Err(RecvTimeoutError::Timeout) if left.is_zero() => {
                    return Err(ProcError::Timeout {
                        role: self.role.clone(),
                        waited: limit,
                    });
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(self.ended()),
            }
        }
    }

    /// Closes the child's input and waits for its end, `limit` at most; then kills it.
    ///
    /// # Errors
    /// [`ProcError`] when it had to be killed or did not end well.
    pub fn finish(mut self, limit: Duration) -> Result<(), ProcError> {
        self.input = None;
        match self.wait(limit) {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(ProcError::Ended {
                role: self.role.clone(),
                how: status.to_string(),
            }),
            None => Err(ProcError::Timeout {
                role: self.role.clone(),
                waited: limit,
            }),
        }
    }

    fn wait(&mut self, limit: Duration) -> Option<ExitStatus> {
        let end = Instant::now() + limit;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if Instant::now() < end => thread::sleep(Duration::from_millis(2)),
                _ => return None,
            }
        }
    }

    fn ended(&mut self) -> ProcError {
        // Its pipe closes a moment before it can be waited for.
        let how = match self.wait(Duration::from_secs(2)) {
            Some(status) => status.to_string(),
            None => "it closed its output but still runs".to_owned(),
        };
        ProcError::Ended {
            role: self.role.clone(),
            how,
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.input = None;
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            // Fails only for a child that has just ended by itself.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Passes protocol lines on and logs all others.
fn forward(role: &str, output: impl Read, sender: &Sender<Line>) {
    let mut reader = BufReader::new(output);
    loop {
        let line = match read_line(&mut reader) {
            Ok(None) => return,
            Ok(Some(line)) => line,
            Err(error) => {
                let _ = sender.send(Line::Broken(error));
                return;
            }
        };
        match line.strip_prefix(MARK) {
            Some(message) => {
                if sender.send(Line::Message(message.to_owned())).is_err() {
                    return;
                }
            }
            None => tracing::info!(role, "{line}"),
        }
    }
}

/// A line without its end; `None` at the end of the input.
fn read_line(reader: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut bytes = Vec::new();
    let read = reader.take(MAX_LINE_BYTES).read_until(b'\n', &mut bytes)?;
    if read == 0 {
        return Ok(None);
    }
    if bytes.pop_if(|last| *last == b'\n').is_none() && read as u64 == MAX_LINE_BYTES {
        let text = format!("a line is longer than {MAX_LINE_BYTES} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}

fn write_line(output: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = String::from(MARK);
    line.push_str(&serde_json::to_string(message)?);
    line.push('\n');
    output.write_all(line.as_bytes())?;
    output.flush()
}

/// The child's end of the pipes.
#[derive(Debug)]
pub struct Parent {
    input: BufReader<io::Stdin>,
}

impl Parent {
    /// To be called first thing in a child: from now on it dies with its parent.
    ///
    /// # Errors
    /// [`ProcError::Ended`] when the parent is gone already.
    pub fn attach() -> Result<Self, ProcError> {
        let gone = || ProcError::Ended {
            role: "parent".to_owned(),
            how: "before this one began; run the demo itself".to_owned(),
        };
        set_parent_process_death_signal(Some(Signal::KILL)).map_err(|errno| ProcError::Pipe {
            role: "parent".to_owned(),
            source: errno.into(),
        })?;
        // It may have died before the line above took effect.
        let expected = env::var(PARENT_VARIABLE)
            .ok()
            .and_then(|text| text.parse().ok())
            .and_then(Pid::from_raw);
        if expected.is_none() || getppid() != expected {
            return Err(gone());
        }
        Ok(Self {
            input: BufReader::new(io::stdin()),
        })
    }

    /// Waits for the next message; `None` when the parent has closed the pipe. The parent bounds the
    /// wait: this process dies with it.
    ///
    /// # Errors
    /// [`ProcError`] when the parent says nonsense.
    pub fn recv<T: DeserializeOwned>(&mut self) -> Result<Option<T>, ProcError> {
        let pipe = |source| ProcError::Pipe {
            role: "parent".to_owned(),
            source,
        };
        let Some(line) = read_line(&mut self.input).map_err(pipe)? else {
            return Ok(None);
        };
        let message = line.strip_prefix(MARK).unwrap_or_default();
        serde_json::from_str(message)
            .map(Some)
            .map_err(|_| ProcError::Unexpected {
                role: "parent".to_owned(),
                text: line.chars().take(300).collect(),
            })
    }

    /// Sends a message.
    ///
    /// # Errors
    /// [`ProcError::Pipe`].
    pub fn send(&self, message: &impl Serialize) -> Result<(), ProcError> {
        write_line(&mut io::stdout().lock(), message).map_err(|source| ProcError::Pipe {
            role: "parent".to_owned(),
            source,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn shell(script: &str) -> Worker {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        Worker::spawn("test", command, &Interrupt::default()).unwrap()
    }

    #[test]
    fn messages_go_there_and_back_past_other_output() {
        let mut worker = shell("echo noise; read line; echo \"$line\"; exit 0");
        worker.send(&vec![1, 2]).unwrap();
        assert_eq!(worker.recv::<Vec<u32>>(5 * SECOND).unwrap(), [1, 2]);
        worker.finish(5 * SECOND).unwrap();
    }

    #[test]
    fn silence_ends_at_the_deadline() {
        let mut worker = shell("sleep 60");
        let start = Instant::now();
        let result = worker.recv::<u32>(Duration::from_millis(100));
        assert!(matches!(result, Err(ProcError::Timeout { .. })));
        assert!(matches!(
            worker.finish(Duration::from_millis(100)),
            Err(ProcError::Timeout { .. })
        ));
        assert!(start.elapsed() < 10 * SECOND, "the child was waited for");
    }

    #[test]
    fn a_dead_child_is_told_from_a_silent_one() {
        let mut worker = shell("exit 7");
        let text = worker.recv::<u32>(5 * SECOND).unwrap_err().to_string();
        assert!(text.contains("exit status: 7"), "{text}");
        let mut worker = shell("kill -9 $$");
        let text = worker.recv::<u32>(5 * SECOND).unwrap_err().to_string();
        assert!(text.contains("signal: 9"), "{text}");
        assert!(matches!(worker.send(&1), Err(ProcError::Ended { .. })));
    }

    #[test]
    fn nonsense_is_a_typed_error() {
        let mut worker = shell("echo 'kvx1 {not json'; sleep 60");
        assert!(matches!(
            worker.recv::<u32>(5 * SECOND),
            Err(ProcError::Unexpected { .. })
        ));
        let endless = vec![b'x'; usize::try_from(MAX_LINE_BYTES).unwrap() + 1];
        assert!(read_line(&mut endless.as_slice()).is_err());
    }

    #[test]
    fn an_interrupt_ends_a_wait_at_once() {
        let mut worker = shell("sleep 60");
        let interrupt = worker.interrupt.clone();
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(100));
            interrupt.raise();
        });
        let start = Instant::now();
        assert!(matches!(
            worker.recv::<u32>(60 * SECOND),
            Err(ProcError::Interrupted)
        ));
        assert!(start.elapsed() < 10 * SECOND);
    }

    /// Runs one of the tests below, which play child processes, in a process of its own.
    fn play(name: &str) -> Worker {
        let test = format!("proc::tests::{name}");
        let arguments = [
            "--exact",
            &test,
            "--ignored",
            "--nocapture",
            "--test-threads=2",
        ];
        Worker::spawn_self(name, &arguments, &[], &Interrupt::default()).unwrap()
    }

    fn is_alive(pid: u32) -> bool {
        // A process that nobody waits for yet is dead all the same.
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(") ")
            .is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
    }

    #[test]
    #[ignore = "plays a child process for other tests"]
    fn child() {
        let mut parent = Parent::attach().unwrap();
        while let Some(number) = parent.recv::<u32>().unwrap() {
            if number == 0 {
                // Deaf to the end of its input.
                thread::sleep(60 * SECOND);
            }
            parent.send(&(number + 1)).unwrap();
        }
    }

    #[test]
    #[ignore = "plays a child process for other tests"]
    fn child_with_a_child() {
        let parent = Parent::attach().unwrap();
        let mut worker = play("child");
        worker.send(&1).unwrap();
        assert_eq!(worker.recv::<u32>(10 * SECOND).unwrap(), 2);
        worker.send(&0).unwrap();
        parent.send(&worker.id()).unwrap();
        thread::sleep(60 * SECOND);
    }

    #[test]
    fn a_child_answers_and_ends_with_its_input() {
        let mut worker = play("child");
        for number in [5, 7] {
            worker.send(&number).unwrap();
            assert_eq!(worker.recv::<u32>(10 * SECOND).unwrap(), number + 1);
        }
        worker.finish(10 * SECOND).unwrap();
    }

    #[test]
    fn a_child_dies_with_a_killed_parent() {
        let mut middle = play("child_with_a_child");
        let grandchild = middle.recv::<u32>(20 * SECOND).unwrap();
        assert!(is_alive(grandchild));
        drop(middle);
        let end = Instant::now() + 10 * SECOND;
        while is_alive(grandchild) {
            assert!(
                Instant::now() < end,
                "process {grandchild} outlives its parent"
            );
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_dropped_worker_is_dead() {
        let worker = shell("sleep 60");
        let pid = Pid::from_raw(i32::try_from(worker.id()).unwrap()).unwrap();
        drop(worker);
        assert!(rustix::process::test_kill_process(pid).is_err());
    }
}
