use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::*;
use crate::transport::AfterError;

/// What a test does to its agent, and sees of it.
#[derive(Debug, Default)]
struct Script {
    /// Posts hang while this holds.
    hang: AtomicBool,
    /// Windows in flight end when this holds.
    land: AtomicBool,
    posts: AtomicU32,
    discarded: AtomicU32,
    destroyed: AtomicBool,
}

struct Scripted(Arc<Script>);

impl Agent for Scripted {
    type Request = ();

    fn register(
        &mut self,
        _: &[RegionGeometry],
        _: Arc<dyn Any + Send + Sync>,
    ) -> Result<(), TransportError> {
        Ok(())
    }

    fn metadata(&mut self) -> Result<Vec<u8>, TransportError> {
        Ok(b"card".to_vec())
    }

    fn load_peer(&mut self, _: &[u8], _: &AgentName) -> Result<(), TransportError> {
        Ok(())
    }

    fn forget_peer(&mut self, _: &AgentName) {}

    fn post_read(
        &mut self,
        _: &AgentName,
        _: Ends,
        batch: &[Descriptor],
    ) -> Result<((), Progress), ReadFault> {
        self.0.posts.fetch_add(1, Ordering::SeqCst);
        while self.0.hang.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        match batch.len() {
            0 => Err(ReadFault {
                error: hangs("post", Duration::ZERO),
                after: AfterError::Quiet,
            }),
            1 => Ok(((), Progress::Done)),
            _ => Ok(((), Progress::Pending)),
        }
    }

    fn poll(&mut self, (): &mut ()) -> Result<Progress, ReadFault> {
        Ok(if self.0.land.load(Ordering::SeqCst) {
            Progress::Done
        } else {
            Progress::Pending
        })
    }

    fn discard(&mut self, (): ()) {
        self.0.discarded.fetch_add(1, Ordering::SeqCst);
    }

    fn notify(&mut self, _: &AgentName, _: &[u8]) -> Result<(), TransportError> {
        Ok(())
    }

    fn notifications(&mut self, _: &mut Vec<(AgentName, Vec<u8>)>) -> Result<(), TransportError> {
        Ok(())
    }

    fn destroy(self) -> Result<(), TransportError> {
        self.0.destroyed.store(true, Ordering::SeqCst);
        Ok(())
    }
}

fn aside() -> (Arc<Script>, Aside<Scripted>, AgentName) {
    let script = Arc::new(Script::default());
    let agent = Aside::new(Scripted(Arc::clone(&script)), || ()).unwrap();
    (script, agent, AgentName::new("peer").unwrap())
}

fn eventually(condition: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(1));
    }
}

const ONE: Descriptor = Descriptor {
    remote: 8,
    local: 16,
    len: 8,
};

fn end(agent: &mut Aside<Scripted>, request: &mut AsideRequest) -> Result<(), ReadFault> {
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        match agent.poll(request)? {
            Progress::Done => return Ok(()),
            Progress::Pending => assert!(Instant::now() < until),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn windows_end_as_they_do_on_the_thread() {
    let (script, mut agent, peer) = aside();
    assert_eq!(agent.metadata().unwrap(), b"card");
    agent.reach(&peer, ONE, Duration::from_secs(30)).unwrap();
    let (mut at_once, _) = agent.post_read(&peer, Ends::HOST, &[ONE]).unwrap();
    end(&mut agent, &mut at_once).unwrap();
    let (mut refused, _) = agent.post_read(&peer, Ends::HOST, &[]).unwrap();
    assert_eq!(
        end(&mut agent, &mut refused).unwrap_err().after,
        AfterError::Quiet
    );
    let (mut later, _) = agent.post_read(&peer, Ends::HOST, &[ONE, ONE]).unwrap();
    eventually(|| script.posts.load(Ordering::SeqCst) == 3);
    assert_eq!(agent.poll(&mut later), Ok(Progress::Pending));
    script.land.store(true, Ordering::SeqCst);
    end(&mut agent, &mut later).unwrap();
    assert_eq!(script.discarded.load(Ordering::SeqCst), 2);
    assert!(agent.notify(&peer, b"x").is_err(), "it might hang");
    agent.destroy().unwrap();
    assert!(script.destroyed.load(Ordering::SeqCst));
}

#[test]
fn a_call_that_hangs_hangs_nobody_and_the_agent_is_destroyed_when_it_returns() {
    let (script, mut agent, peer) = aside();
    script.hang.store(true, Ordering::SeqCst);
    let (mut first, _) = agent.post_read(&peer, Ends::HOST, &[ONE, ONE]).unwrap();
    let (mut second, _) = agent.post_read(&peer, Ends::HOST, &[ONE, ONE]).unwrap();
    eventually(|| script.posts.load(Ordering::SeqCst) == 1);
    assert_eq!(agent.poll(&mut first), Ok(Progress::Pending));
    assert_eq!(agent.poll(&mut second), Ok(Progress::Pending));
    let limit = Duration::from_millis(10);
    assert!(agent.reach(&peer, ONE, limit).is_err());
    assert!(agent.may_hang());
    let waiting = std::thread::spawn(move || agent.destroy_patiently());
    std::thread::sleep(Duration::from_millis(50));
    assert!(!waiting.is_finished(), "its bytes may still land");
    assert!(!script.destroyed.load(Ordering::SeqCst));
    script.hang.store(false, Ordering::SeqCst);
    waiting.join().unwrap().unwrap();
    assert!(script.destroyed.load(Ordering::SeqCst));
    assert_eq!(
        script.posts.load(Ordering::SeqCst),
        1,
        "what had not been posted never is"
    );
}

#[test]
fn an_agent_that_hangs_is_not_waited_for_where_others_wait() {
    let (script, mut agent, peer) = aside();
    script.hang.store(true, Ordering::SeqCst);
    let _ = agent.post_read(&peer, Ends::HOST, &[ONE]).unwrap();
    eventually(|| script.posts.load(Ordering::SeqCst) == 1);
    assert!(agent.destroy().is_err(), "its writes may go on");
    script.hang.store(false, Ordering::SeqCst);
    eventually(|| script.destroyed.load(Ordering::SeqCst));
    // One that is dropped goes by itself, too.
    let (script, agent, _) = aside();
    drop(agent);
    eventually(|| script.destroyed.load(Ordering::SeqCst));
}
