//! What is opened is closed: descriptors and threads, on both sides.

use std::time::{Duration, Instant};

use moontide_transfer::sample::SampleConfig;
use moontide_transfer::{OwnedOp, Transfer};
use rustix::process::Signal;

use crate::kit::{MIB, Rng, count, counts_of, get_into, get_right, in_ms, link, settles, soon};
use crate::process::OwnerProcess;

pub fn counts() {
    let mut rng = Rng::seeded();
    let config = SampleConfig {
        record_bytes: 4 * MIB,
        readable: 1,
        writable: 0,
        digests: false,
        ..Default::default()
    };
    let (content, owner) = (config.content(0), OwnerProcess::start(&config));
    let me = std::process::id();
    // Once, so that what is made once is there.
    get_right(&*link(owner.address(), 2), &config, 0, &content);
    // Its threads at the owner end a moment later: one that listens and the main thread stay.
    let until = in_ms(5000);
    while counts_of(owner.pid()).1 > 2 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(50));
    let (mine, its) = (counts_of(me), counts_of(owner.pid()));

    let cycles = count(200, 2000);
    let mut memory = vec![0; content.len()];
    for _ in 0..cycles {
        let link = link(owner.address(), rng.within(1, 5) as usize);
        let large = || vec![OwnedOp::get(config.target(0), 0, vec![0; 4 << 20])];
        match rng.within(0, 6) {
            0 => {}
            1 => get_right(&*link, &config, 0, &content),
            2 => {
                let transfer = Transfer::start(&*link, large(), soon());
                std::thread::sleep(Duration::from_micros(rng.within(0, 3000)));
                drop(transfer);
            }
            // The link first.
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
    settles(me, mine, "this process after links were opened and closed");
    settles(owner.pid(), its, "the owner after links were opened and closed");

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
    settles(me, mine, "this process after its peers were killed");
    println!(
        "{cycles} links: (descriptors, threads) {mine:?} here and {its:?} at the owner, before and after"
    );
}
