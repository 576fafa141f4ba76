//! Models of what threads share, under every order that the memory model allows. The files checked
//! are the library's own: they share memory through `crate::sync`, which here is the model checker's.
//! An ordinary test; needs no flags.
#![allow(dead_code, missing_docs, clippy::unwrap_used)]

#[path = "../../kv-xfer/src/engine/completion.rs"]
mod completion;
#[path = "../../kv-xfer/src/memory/publish.rs"]
mod publish;

/// The model checker's types behind the names and signatures that the library uses.
mod sync {
    use std::ops::{Deref, DerefMut};
    use std::time::Instant;

    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

    #[derive(Debug)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);
    pub(crate) struct Guard<'a, T>(Option<loom::sync::MutexGuard<'a, T>>);
    #[derive(Debug)]
    pub(crate) struct Condvar(loom::sync::Condvar);
    pub(crate) struct Timeout;

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> Guard<'_, T> {
            Guard(Some(self.0.lock().unwrap()))
        }
    }

    impl<T> Deref for Guard<'_, T> {
        type Target = T;
        fn deref(&self) -> &T {
            self.0.as_ref().unwrap()
        }
    }

    impl<T> DerefMut for Guard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.0.as_mut().unwrap()
        }
    }

    impl Condvar {
        pub(crate) fn new() -> Self {
            Self(loom::sync::Condvar::new())
        }

        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }

        pub(crate) fn wait<T>(&self, guard: &mut Guard<'_, T>) {
            let inner = guard.0.take().unwrap();
            guard.0 = Some(self.0.wait(inner).unwrap());
        }

        /// Time does not pass in a model.
        pub(crate) fn wait_until<T>(&self, guard: &mut Guard<'_, T>, _: Instant) -> Timeout {
            self.wait(guard);
            Timeout
        }
    }

    impl Timeout {
        pub(crate) fn timed_out(&self) -> bool {
            false
        }
    }
}

use std::sync::Arc as StdArc;
use std::sync::atomic::{AtomicUsize, Ordering as StdOrdering};
use std::task::{Poll, Wake, Waker};

use completion::{Abandoned, Completion};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use loom::thread;

#[test]
fn whoever_waits_gets_the_one_outcome() {
    loom::model(|| {
        let shared = Arc::new(Completion::new());
        let driver = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let first = shared.finish(1).is_ok();
                // A second terminal event is given back.
                assert_eq!(shared.finish(2).unwrap_err(), 2);
                assert!(first);
            })
        };
        shared.wait(None);
        assert_eq!(shared.take(), Some(1));
        assert_eq!(shared.take(), None);
        driver.join().unwrap();
    });
}

#[test]
fn of_two_who_end_a_read_one_does() {
    loom::model(|| {
        let shared = Arc::new(Completion::new());
        let other = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.finish(1).is_ok())
        };
        let here = shared.finish(2).is_ok();
        let there = other.join().unwrap();
        assert!(here != there);
        assert_eq!(shared.take(), Some(if there { 1 } else { 2 }));
    });
}

#[test]
fn an_outcome_is_never_lost_between_an_end_and_a_drop() {
    loom::model(|| {
        let shared = Arc::new(Completion::new());
        let driver = {
            let shared = Arc::clone(&shared);
            // What the driver gets back it gives to the pool.
            thread::spawn(move || shared.finish(7).err())
        };
        let dropped = match shared.abandon() {
            Abandoned::Finished(outcome) => Some(*outcome),
            Abandoned::Running => None,
            Abandoned::Taken => panic!("nobody has taken it"),
        };
        let given_back = driver.join().unwrap();
        // The blocks come home by exactly one of the two ways.
        assert!(
            dropped.is_some() != given_back.is_some(),
            "{dropped:?} {given_back:?}"
        );
        assert_eq!(dropped.or(given_back), Some(7));
        assert!(shared.is_cancelled());
    });
}

#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: StdArc<Self>) {
        self.0.fetch_add(1, StdOrdering::SeqCst);
    }
}

#[test]
fn a_poll_that_is_pending_is_woken() {
    loom::model(|| {
        let shared = Arc::new(Completion::new());
        let woken = StdArc::new(Woken::default());
        let driver = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                if let Ok(Some(waker)) = shared.finish(3) {
                    waker.wake();
                }
            })
        };
        let polled = shared.poll(Waker::from(StdArc::clone(&woken)));
        driver.join().unwrap();
        match polled {
            Poll::Ready(outcome) => assert_eq!(outcome, Some(3)),
            Poll::Pending => {
                assert_eq!(woken.0.load(StdOrdering::SeqCst), 1, "it sleeps for ever");
                assert_eq!(shared.take(), Some(3));
            }
        }
    });
}

#[test]
fn a_reader_that_sees_new_content_sees_the_new_word() {
    const OLD: u64 = 5;
    loom::model(|| {
        let word = Arc::new(AtomicU64::new(OLD));
        let content = Arc::new(AtomicU64::new(10));
        let holder = {
            let (word, content) = (Arc::clone(&word), Arc::clone(&content));
            thread::spawn(move || {
                publish::publish(&word, OLD + 1);
                // The block's next owner fills it.
                content.store(20, Ordering::Relaxed);
            })
        };
        // The transport brings the bytes, then the word.
        let bytes = content.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let read = word.load(Ordering::Relaxed);
        assert!(
            read != OLD || bytes == 10,
            "changed bytes under the old word"
        );
        holder.join().unwrap();
    });
}

/// The hand-over of commands, the size of a model: the library's queue is `crossbeam`'s, whose own
/// models its authors run. What is ours is the order in which a caller leaves a command and wakes the
/// driver, and in which the driver takes the wake-up and looks.
#[test]
fn a_command_left_while_the_driver_looks_away_is_found() {
    struct Queue {
        /// `cancelled` of one read, or a command in the channel.
        command: AtomicBool,
        /// The wake-up channel of capacity one.
        wake: AtomicBool,
    }
    loom::model(|| {
        let queue = Arc::new(Queue {
            command: AtomicBool::new(false),
            wake: AtomicBool::new(false),
        });
        let caller = {
            let queue = Arc::clone(&queue);
            thread::spawn(move || {
                queue.command.store(true, Ordering::Release);
                // `try_send`: a full channel means that the driver is about to look anyway.
                queue.wake.swap(true, Ordering::AcqRel);
            })
        };
        let mut found = false;
        for _ in 0..2 {
            // One round of the driver: the wake-up is taken first, then everything is looked at.
            let _ = queue.wake.swap(false, Ordering::AcqRel);
            found |= queue.command.load(Ordering::Acquire);
        }
        caller.join().unwrap();
        // Found, or there is a wake-up left that keeps the driver from sleeping.
        assert!(found || queue.wake.load(Ordering::Acquire), "nobody looks");
    });
}
