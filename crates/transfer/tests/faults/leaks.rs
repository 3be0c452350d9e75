//! Leaks of descriptors and threads, at both ends.

use std::time::{Duration, Instant};

use moontide_transfer::sample::SampleNodeConfig;
use moontide_transfer::{OwnedOp, Transfer};
use rustix::process::Signal;

use crate::harness::{MIB, Rng, count, counts_of, get_into, get_ok, in_ms, link, soon, wait_for_counts};
use crate::process::OwnerProcess;

pub fn counts() {
    let mut rng = Rng::seeded();
    let config = SampleNodeConfig {
        record_bytes: 4 * MIB,
        readable: 1,
        writable: 0,
        digests: false,
        ..Default::default()
    };
    let (content, owner) = (config.content(0), OwnerProcess::start(&config));
    let own_pid = std::process::id();
    // Once, so that everything that is created only once exists.
    get_ok(&*link(owner.address(), 2), &config, 0, &content);
    // Its threads at the owner end a moment later: the listener and the main thread remain.
    let until = in_ms(5000);
    while counts_of(owner.pid()).1 > 2 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(50));
    let (own_counts, owner_counts) = (counts_of(own_pid), counts_of(owner.pid()));

    let cycles = count(200, 2000);
    let mut memory = vec![0; content.len()];
    for _ in 0..cycles {
        let link = link(owner.address(), rng.within(1, 5) as usize);
        let large = || vec![OwnedOp::get(config.target(0), 0, vec![0; 4 << 20])];
        match rng.within(0, 6) {
            0 => {}
            1 => get_ok(&*link, &config, 0, &content),
            2 => {
                let transfer = Transfer::start(&*link, large(), soon());
                std::thread::sleep(Duration::from_micros(rng.within(0, 3000)));
                drop(transfer);
            }
            // The link is dropped first.
            3 => {
                let transfer = Transfer::start(&*link, large(), soon());
                drop(link);
                let _ = transfer.wait();
            }
            4 => {
                let _ = Transfer::start(&*link, large(), in_ms(2)).wait();
            }
            _ => {
                let _ = get_into(&*link, &config, 0, &content, &mut memory, in_ms(rng.within(0, 10)));
            }
        }
    }
    wait_for_counts(own_pid, own_counts, "this process after links were opened and closed");
    wait_for_counts(owner.pid(), owner_counts, "the owner after links were opened and closed");

    for _ in 0..count(5, 50) {
        let victim = OwnerProcess::start(&config);
        let link = link(victim.address(), 2);
        let transfer =
            Transfer::start(&*link, vec![OwnedOp::get(config.target(0), 0, vec![0; 4 << 20])], in_ms(2000));
        std::thread::sleep(Duration::from_micros(rng.within(0, 5000)));
        victim.signal(Signal::KILL);
        let _ = transfer.wait();
        let _ = get_into(&*link, &config, 0, &content, &mut memory, in_ms(300));
    }
    wait_for_counts(own_pid, own_counts, "this process after its peers were killed");
    println!(
        "{cycles} links: (descriptors, threads) {own_counts:?} in this process and {owner_counts:?} at the owner, \
         before and after"
    );
}
