#![allow(missing_docs)]
use kv_xfer::world::*;
fn main() {
    let a: Vec<u64> = std::env::args()
        .skip(1)
        .filter_map(|a| a.parse().ok())
        .collect();
    let (seed, count) = (a[0], a[1]);
    let trace = a.get(2).is_some_and(|t| *t > 0);
    let steps = a.get(3).map_or(160, |s| *s as u32);
    let s = Scenario { steps, trace };
    let t = std::time::Instant::now();
    let mut tally = Tally::default();
    let (mut ev, mut bad) = (0, 0);
    for i in seed..seed + count {
        let o = World::run(i, &s);
        tally.add(&o.tally);
        ev += o.events;
        for line in &o.trace {
            println!("{line}");
        }
        if !o.violations.is_empty() {
            bad += 1;
            if bad <= 12 {
                println!("seed {i}: {}", o.violations[0]);
            }
        }
    }
    println!(
        "{count} histories {ev} events {bad} bad {:?} {tally:?}",
        t.elapsed()
    );
}
