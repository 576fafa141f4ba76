//! What can happen to the network between a reader and its holder, over real TCP between machines
//! made of network namespaces. Whatever it is: each read ends once and in time, what has landed is
//! right, every block comes back, other holders are read from meanwhile, and the holder is read from
//! again once the network is.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, missing_docs)]

mod support;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use kv_xfer::engine::{Engine, FailedBlocks, Offer, ReadError, ReadHandle, ReadRequest};
use kv_xfer::ids::BlockId;
use support::*;

#[test]
#[ignore = "the body of the holders' processes"]
fn holder_process() {
    serve_holder();
}

/// Blocks of the bystander's reads, at the beginning of the reader's pool.
const ASIDE: u32 = 16;
/// Blocks of a read from the holder that is cut off: 16 MiB.
const EACH: u32 = 256;
/// Some three seconds for a read of that size, so that it is caught in flight.
const RATE: &str = "50mbit";
const TIMEOUT: Duration = Duration::from_secs(2);

/// What was done and what came of it.
#[derive(Debug, Default)]
struct Figures {
    faults: u32,
    ended: u32,
    landed: u32,
    noticed: Duration,
    returned: Duration,
    recovered: Duration,
}

struct Scene<'a> {
    net: Net,
    reader: &'a Engine,
    holder: Holder,
    spec: HolderSpec,
    remote: Vec<BlockId>,
    figures: Figures,
    lives: u16,
    /// Of which generation of content.
    offer: Option<(Offer, u16)>,
}

impl Scene<'_> {
    fn lend(&mut self) {
        self.lives += 1;
        let lent = self
            .holder
            .lend(&format!("r{}", self.lives), &self.remote, self.lives);
        let offer = self.reader.accept(&lent.remote, None, None).unwrap();
        self.offer = Some((offer, self.lives));
    }

    fn request(&self) -> ReadRequest<'_> {
        let (offer, _) = self.offer.as_ref().unwrap();
        ReadRequest {
            timeout: TIMEOUT,
            ..keeping(offer, claim(self.reader, ASIDE..ASIDE + EACH))
        }
    }

    /// Waits for a read's one end, and until its blocks are back. True if it landed.
    fn ends(&mut self, mut handle: ReadHandle, since: Instant) -> bool {
        let generation = self.offer.as_ref().unwrap().1;
        let outcome = handle.wait_timeout(LIMIT).expect("it ends in time");
        self.figures.ended += 1;
        self.figures.noticed = self.figures.noticed.max(since.elapsed());
        assert!(
            handle.wait_timeout(Duration::ZERO).is_none(),
            "it ends once"
        );
        match outcome {
            Ok(landed) => {
                assert_eq!(wrong_words(&landed.blocks, &self.remote, generation), 0);
                self.figures.landed += 1;
                true
            }
            Err(failure) => {
                let told = matches!(
                    failure.error,
                    ReadError::Deadline { .. }
                        | ReadError::Transport { .. }
                        | ReadError::Connect { .. }
                        | ReadError::PeerSilent { .. }
                        | ReadError::Fenced { .. }
                );
                assert!(told, "{failure}");
                if let FailedBlocks::Quarantined { blocks } = failure.blocks {
                    assert_eq!(blocks, EACH as usize);
                    let back = self.reader.returned().recv_timeout(LIMIT).unwrap();
                    assert_eq!(back.blocks.len(), EACH as usize);
                    let after = since.elapsed();
                    self.figures.returned = self.figures.returned.max(after);
                }
                false
            }
        }
    }

    /// Reads until it lands again; a holder that UCX has ended gets a successor.
    fn recovers(&mut self) {
        let since = Instant::now();
        loop {
            assert!(since.elapsed() < LIMIT, "it is not read from again");
            if !self.holder.answers() {
                println!("the holder was ended by UCX: {}", self.holder.ended());
                self.holder = Holder::start(&self.spec);
                self.lend();
            }
            let handle = self.reader.read(self.request()).unwrap();
            if self.ends(handle, Instant::now()) {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        self.figures.recovered = self.figures.recovered.max(since.elapsed());
    }

    /// A read of which a layer is there and others are not.
    fn running(&mut self) -> ReadHandle {
        loop {
            let handle = self.reader.read(self.request()).unwrap();
            let until = Instant::now() + TIMEOUT;
            while handle.layers_ready() == 0 && Instant::now() < until {
                std::thread::sleep(Duration::from_micros(200));
            }
            if handle.layers_ready() > 0 {
                return handle;
            }
            // UCX may end the holder some time after an outage, and a busy machine may be too slow. A whole read
            // takes longer than it may while the holder's rate is limited.
            assert!(!self.ends(handle, Instant::now()));
            self.net.unlimit(HOLDER);
            self.recovers();
            self.net.limit(HOLDER, RATE).unwrap();
        }
    }

    /// An outage before the holder is met, while it is idle and while it is read from.
    fn suffers(&mut self, outage: Outage) {
        for stage in 0..3 {
            if stage == 0 {
                self.holder = Holder::start(&HolderSpec {
                    port: 0,
                    ..self.spec.clone()
                });
                self.spec.port = self.holder.port;
                self.lend();
            }
            if stage == 2 {
                self.net.limit(HOLDER, RATE).unwrap();
            }
            let running = (stage == 2).then(|| self.running());
            let since = Instant::now();
            self.net.strike(outage, HOLDER);
            self.figures.faults += 1;
            let handle = running.unwrap_or_else(|| self.reader.read(self.request()).unwrap());
            let landed = self.ends(handle, since);
            assert!(!landed, "nothing can land in stage {stage} of {outage:?}");
            self.net.repair(outage, HOLDER);
            if stage == 2 {
                self.net.unlimit(HOLDER);
            }
            self.recovers();
        }
    }
}

over!(an_outage_costs_its_own_reads_their_time_and_nobody_any_bytes: net);
fn an_outage_costs_its_own_reads_their_time_and_nobody_any_bytes() {
    let net = Net::current().unwrap();
    if let Err(why) = net.limit(HOLDER, RATE) {
        return println!("skipped: {why}");
    }
    net.unlimit(HOLDER);
    let mut other = Holder::start(&HolderSpec::new(Shape::MEDIUM, ASIDE).on(OTHER));
    let reader = reader(Shape::MEDIUM, ASIDE + EACH, |config| {
        config.reader.connect_timeout = Duration::from_secs(1);
        config.reader.abandon_after = Duration::from_secs(1);
    });
    let aside: Vec<_> = ids((0..ASIDE).rev());
    let lent = other.lend("aside", &aside, 1);
    let other_offer = reader.accept(&lent.remote, None, None).unwrap();
    let (stop, count) = (AtomicBool::new(false), AtomicU32::new(0));
    let spec = HolderSpec::new(Shape::MEDIUM, EACH);
    let mut scene = Scene {
        net,
        holder: Holder::start(&spec),
        reader: &reader,
        spec,
        remote: shuffled(EACH as usize, EACH, 5),
        figures: Figures::default(),
        lives: 0,
        offer: None,
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let blocks = claim(&reader, 0..ASIDE);
                let landed = landed(read(&reader, keeping(&other_offer, blocks)));
                assert_eq!(wrong_words(&landed.blocks, &aside, 1), 0);
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        let stopping = Stop(&stop);
        for outage in [
            Outage::Dropped,
            Outage::Unplugged,
            Outage::DownAtHolder,
            Outage::Unreachable,
        ] {
            let before = count.load(Ordering::Relaxed);
            scene.suffers(outage);
            assert!(count.load(Ordering::Relaxed) > before, "the other goes on");
        }
        drop(stopping);
    });
    let aside = count.load(Ordering::Relaxed);
    println!(
        "shown: {:?}; {aside} reads from another holder",
        scene.figures
    );
    drop(scene);
    assert_clean(&reader);
}

/// Ends the bystander, also when the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

over!(a_network_that_is_slow_late_or_lossy_changes_no_bytes: net);
fn a_network_that_is_slow_late_or_lossy_changes_no_bytes() {
    const BLOCKS: u32 = 64;
    let net = Net::current().unwrap();
    let mut holder = Holder::start(&HolderSpec::new(Shape::MEDIUM, BLOCKS));
    let reader = reader(Shape::MEDIUM, BLOCKS, |config| {
        config.reader.abandon_after = Duration::from_secs(1);
    });
    let remote = shuffled(BLOCKS as usize, BLOCKS, 4);
    let lent = holder.lend("r", &remote, 1);
    let mut offer = reader.accept(&lent.remote, None, None).unwrap();
    let reads = |offer: &Offer, what: &str, count: u32| {
        let since = Instant::now();
        for _ in 0..count {
            let blocks = claim(&reader, 0..BLOCKS);
            let landed = landed(read(&reader, keeping(offer, blocks)));
            assert_eq!(wrong_words(&landed.blocks, &remote, 1), 0, "{what}");
        }
        println!(
            "shown: {what}: {count} reads of 4 MiB, {:?}",
            since.elapsed() / count
        );
    };
    reads(&offer, "a good network", 20);
    match net.limit(HOLDER, "100mbit") {
        Ok(()) => {
            reads(&offer, "100 Mbit/s", 3);
            // Less than its time allows: told in time, in doubt until it is fenced.
            net.limit(HOLDER, "1mbit").unwrap();
            let slow = ReadRequest {
                timeout: Duration::from_secs(1),
                ..keeping(&offer, claim(&reader, 0..BLOCKS))
            };
            let failure = failed(read(&reader, slow));
            assert!(
                matches!(failure.error, ReadError::Deadline { .. }),
                "{failure}"
            );
            assert!(matches!(failure.blocks, FailedBlocks::Quarantined { .. }));
            let back = reader.returned().recv_timeout(LIMIT).unwrap();
            assert_eq!(back.blocks.len(), BLOCKS as usize);
            drop(back);
            net.unlimit(HOLDER);
            // With the reader's agent its connection goes, and UCX may end the holder for that.
            if !holder.answers() {
                println!("shown: UCX ended the holder: {}", holder.ended());
                holder = Holder::start(&HolderSpec::new(Shape::MEDIUM, BLOCKS));
                let lent = holder.lend("r", &remote, 1);
                offer = reader.accept(&lent.remote, None, None).unwrap();
            }
            eventually("it is read from again", || {
                reader.returned().try_iter().for_each(drop);
                reader
                    .pool()
                    .claim(ids(0..BLOCKS))
                    .is_ok_and(|blocks| read(&reader, keeping(&offer, blocks)).is_ok())
            });
        }
        Err(why) => println!("skipped: {why}"),
    }
    for (delay, loss) in [(20, 0), (5, 10), (1, 100)] {
        match net.wire(Duration::from_millis(delay), loss) {
            Ok(wire) => {
                let lost = f64::from(loss) / 10.0;
                reads(
                    &offer,
                    &format!("{delay} ms late each way, {lost} % lost"),
                    3,
                );
                net.unwire(wire);
            }
            Err(why) => println!("skipped: {why}"),
        }
    }
    reads(&offer, "a good network again", 20);
    assert_clean(&reader);
    assert!(holder.answers(), "it has survived");
}

over!(a_reader_that_is_cut_off_while_it_reads_leaves_its_holder_in_order: net);
fn a_reader_that_is_cut_off_while_it_reads_leaves_its_holder_in_order() {
    let net = Net::current().unwrap();
    let mut holder = Holder::start(&HolderSpec::new(Shape::MEDIUM, EACH));
    let remote = shuffled(EACH as usize, EACH, 4);
    let lent = holder.lend("r", &remote, 1);
    let reader = reader(Shape::MEDIUM, EACH, |config| {
        config.reader.abandon_after = Duration::from_millis(500);
    });
    let offer = reader.accept(&lent.remote, None, None).unwrap();
    let short = || ReadRequest {
        timeout: Duration::from_secs(1),
        ..keeping(&offer, claim(&reader, 0..EACH))
    };
    drop(landed(read(&reader, short())));
    net.strike(Outage::Dropped, READER);
    let failure = failed(read(&reader, short()));
    assert!(
        matches!(
            failure.error,
            ReadError::Deadline { .. } | ReadError::Transport { .. }
        ),
        "{failure}"
    );
    // Neither the release nor anything else reaches the holder, which needs none of it.
    if !holder.answers() {
        net.repair(Outage::Dropped, READER);
        return println!(
            "skipped: UCX ended the holder, which was to revoke: {}",
            holder.ended()
        );
    }
    holder.begin_revoke(lent.lease, Duration::ZERO, 2);
    assert!(holder.end_revoke(), "the lease was its to end");
    net.repair(Outage::Dropped, READER);
    // The descriptor is of the lease that has ended.
    let mut last = None;
    eventually("it hears so", || {
        reader.returned().try_iter().for_each(drop);
        let Ok(blocks) = reader.pool().claim(ids(0..EACH)) else {
            return false;
        };
        let short = ReadRequest {
            timeout: Duration::from_secs(1),
            ..keeping(&offer, blocks)
        };
        let failure = failed(read(&reader, short));
        let lost = matches!(failure.error, ReadError::LeaseLost { .. });
        last = Some(failure.to_string());
        lost
    });
    println!("shown: {}", last.unwrap());
    assert_clean(&reader);
}
