//! Streams that are fragmented, slow, or break in the middle.

use std::time::{Duration, Instant};

use moontide_proto::FrameKind;
use moontide_transfer::sample::SampleNodeConfig;
use moontide_transfer::{Op, call, run};
use moontide_types::ErrorCode;

use crate::harness::{
    MIB, Rng, WakeupJitter, check_typed, count, get_into, in_ms, link, open, put_from, soon,
};
use crate::process::OwnerProcess;
use crate::proxy::{Proxy, ProxyFaults};

const NO_FAULTS: ProxyFaults =
    ProxyFaults { fragment_max: 64 << 10, buffer_bytes: None, break_within: None, rate: None };

pub fn fragmented() {
    let mut rng = Rng::seeded();
    let cases = [
        (1, ProxyFaults { fragment_max: 7, buffer_bytes: Some(1), ..NO_FAULTS }),
        (3000, ProxyFaults { fragment_max: 7, buffer_bytes: Some(1), ..NO_FAULTS }),
        (40_000, ProxyFaults { fragment_max: 7, buffer_bytes: Some(16 << 10), ..NO_FAULTS }),
        (2 * MIB + 17, ProxyFaults { fragment_max: 5000, buffer_bytes: Some(64 << 10), ..NO_FAULTS }),
        (9 * MIB + 1, ProxyFaults { fragment_max: 100_000, buffer_bytes: Some(64 << 10), ..NO_FAULTS }),
    ];
    for (record_bytes, faults) in cases {
        let began = Instant::now();
        let config = SampleNodeConfig { record_bytes, readable: 2, writable: 4, ..Default::default() };
        let owner = OwnerProcess::start(&config);
        let proxy = Proxy::start(owner.address(), faults, rng.fork());
        for connections in [1, 2] {
            let link = link(proxy.address, connections);
            for record in 0..2 {
                let content = config.content(record);
                let mut memory = vec![0xee; content.len()];
                get_into(&*link, &config, record, &content, &mut memory, soon())
                    .expect("the stream does not break");
            }
            // Puts, digested during the transfer. The node digests the received bytes, so that a commit proves them
            // complete.
            let record = 1 + connections as u32 * 2 - 1;
            let content = config.content(77);
            let context = config.digest_context(record);
            let mut digests = vec![0; record_bytes.div_ceil(moontide_types::limits::PAGE_BYTES) as usize];
            let target = config.target(record);
            let mut ops = [Op::put(target, 0, &content).digested(context, &mut digests).expect("whole")];
            run(&*link, &mut ops, soon()).expect("the stream does not break");
            assert_eq!(ops[0].outcome(), Some(Ok(())));
            let root = context.root_of(digests.iter().copied());
            let reply =
                call(&*link, FrameKind::Commit, config.commit_body(record, root), soon()).expect("a call");
            assert_eq!(crate::harness::codes(&reply), [None], "{record_bytes} bytes over {connections}");
            let mut memory = vec![0xee; content.len()];
            get_into(&*link, &config, record, &content, &mut memory, soon())
                .expect("the stream does not break");
        }
        println!(
            "{record_bytes} bytes in fragments of at most {}: {:?}",
            faults.fragment_max,
            began.elapsed()
        );
    }
}

pub fn broken_gets() {
    let mut rng = Rng::seeded();
    let config = SampleNodeConfig { record_bytes: MIB / 2, readable: 1, writable: 0, ..Default::default() };
    let (content, owner) = (config.content(0), OwnerProcess::start(&config));
    let jitter = WakeupJitter::new();
    let mut memory = vec![0; 4 * content.len()];
    let (mut right, mut failed, mut longest) = (0, 0, Duration::ZERO);
    let gets = count(200, 3000);
    // Several gets per proxy and link: a link is used again after its stream broke.
    while right + failed < gets {
        let break_within = Some(rng.within(100, 3 * memory.len() as u64));
        let proxy = Proxy::start(owner.address(), ProxyFaults { break_within, ..NO_FAULTS }, rng.fork());
        let connections = rng.within(1, 4) as usize;
        let Ok(link) = open(&[proxy.address], connections, soon()) else { continue };
        for _ in 0..4 {
            memory.fill(0xee);
            jitter.reset();
            let (began, deadline) = (Instant::now(), in_ms(3000));
            match get_into(&*link, &config, 0, &content, &mut memory, deadline) {
                Ok(()) => right += 1,
                Err(error) => {
                    check_typed(&error);
                    failed += 1;
                }
            }
            jitter.check(deadline, "a get whose stream broke");
            longest = longest.max(began.elapsed());
        }
    }
    println!("{right} gets correct, {failed} failed, the longest took {longest:?}");
    assert!(right > 0 && failed > 0);
}

pub fn broken_puts() {
    let mut rng = Rng::seeded();
    let records = count(40, 400);
    let config =
        SampleNodeConfig { record_bytes: MIB + 100, readable: 1, writable: records, ..Default::default() };
    let (content, owner) = (config.content(9), OwnerProcess::start(&config));
    let direct = link(owner.address(), 1);
    let jitter = WakeupJitter::new();
    let (mut right, mut failed, mut busy) = (0, 0, 0);
    for record in 1..=records {
        let break_within = Some(rng.within(300, 4 * content.len() as u64));
        let proxy = Proxy::start(owner.address(), ProxyFaults { break_within, ..NO_FAULTS }, rng.fork());
        let Ok(broken) = open(&[proxy.address], 2, soon()) else { continue };
        let mut ops = [Op::put(config.target(record), 0, &content)];
        jitter.reset();
        let deadline = in_ms(3000);
        let result = run(&*broken, &mut ops, deadline);
        jitter.check(deadline, "a put whose stream broke");
        match result {
            Ok(()) => right += 1,
            Err(error) => {
                check_typed(&error);
                failed += 1;
                // A started put can be completed over another connection.
                let mut again = [Op::put(config.target(record), 0, &content)];
                run(&*direct, &mut again, soon()).expect("the stream does not break");
                assert_eq!(again[0].outcome(), Some(Ok(())));
            }
        }
        let root = config.digest_context(record).payload(&content, |_| ());
        let until = in_ms(3000);
        let codes = loop {
            let body = config.commit_body(record, root);
            let reply = call(&*direct, FrameKind::Commit, body, soon()).expect("a call");
            let codes = crate::harness::codes(&reply);
            // The node may still receive bytes of the broken stream: it has not read the end of it.
            if codes != [Some(ErrorCode::Busy)] || Instant::now() > until {
                break codes;
            }
            busy += 1;
        };
        assert_eq!(codes, [None], "the node has the bytes that were put");
    }
    println!("{right} puts correct, {failed} failed and put again; {busy} commits were too early");
}

/// A stream that makes progress, however slow, is not stalled.
pub fn slow_is_not_stalled() {
    let mut rng = Rng::seeded();
    let config = SampleNodeConfig { record_bytes: 4 * MIB, readable: 1, writable: 2, ..Default::default() };
    let (content, owner) = (config.content(0), OwnerProcess::start(&config));
    let faults = ProxyFaults {
        fragment_max: 32 << 10,
        buffer_bytes: Some(64 << 10),
        rate: Some(2 << 20),
        ..NO_FAULTS
    };
    let proxy = Proxy::start(owner.address(), faults, rng.fork());
    let link = link(proxy.address, 1);
    let began = Instant::now();
    let mut memory = vec![0; content.len()];
    let got = get_into(&*link, &config, 0, &content, &mut memory, soon());
    println!("get: {got:?} after {:?}", began.elapsed());
    let began = Instant::now();
    let put = put_from(&*link, &config, &[&content[..], &content[..]].concat(), soon());
    println!("put: {put:?} after {:?}", began.elapsed());
    got.expect("a slow get");
    put.expect("a slow put");
}
