//! Streams that come in small pieces, slowly, or end in the middle.

use std::time::{Duration, Instant};

use moontide_proto::FrameKind;
use moontide_transfer::sample::SampleConfig;
use moontide_transfer::{Op, call, run};
use moontide_types::ErrorCode;

use crate::kit::{MIB, Punctual, Rng, check_typed, count, get_into, in_ms, link, open, put_from, soon};
use crate::process::OwnerProcess;
use crate::proxy::{Manners, Proxy};

const WELL: Manners = Manners { piece_max: 64 << 10, buffer: None, cut_within: None, rate: None };

pub fn pieces() {
    let mut rng = Rng::seeded();
    let cases = [
        (1, Manners { piece_max: 7, buffer: Some(1), ..WELL }),
        (3000, Manners { piece_max: 7, buffer: Some(1), ..WELL }),
        (40_000, Manners { piece_max: 7, buffer: Some(16 << 10), ..WELL }),
        (2 * MIB + 17, Manners { piece_max: 5000, buffer: Some(64 << 10), ..WELL }),
        (9 * MIB + 1, Manners { piece_max: 100_000, buffer: Some(64 << 10), ..WELL }),
    ];
    for (record_bytes, manners) in cases {
        let began = Instant::now();
        let config = SampleConfig { record_bytes, readable: 2, writable: 4, ..Default::default() };
        let owner = OwnerProcess::start(&config);
        let proxy = Proxy::start(owner.address(), manners, rng.fork());
        for connections in [1, 2] {
            let link = link(proxy.address, connections);
            for record in 0..2 {
                let content = config.content(record);
                let mut memory = vec![0xee; content.len()];
                get_into(&*link, &config, record, &content, &mut memory, soon()).expect("nothing is cut");
            }
            // Puts, digested on the way; the node hashes what came, so that a commit shows it whole.
            let record = 1 + connections as u32 * 2 - 1;
            let content = config.content(77);
            let context = config.digest_context(record);
            let mut digests = vec![0; record_bytes.div_ceil(moontide_types::bounds::PAGE_BYTES) as usize];
            let target = config.target(record);
            let mut ops = [Op::put(target, 0, &content).digested(context, &mut digests).expect("whole")];
            run(&*link, &mut ops, soon()).expect("nothing is cut");
            assert_eq!(ops[0].outcome(), Some(Ok(())));
            let root = context.root_of(digests.iter().copied());
            let reply =
                call(&*link, FrameKind::Commit, config.commit_body(record, root), soon()).expect("a call");
            assert_eq!(crate::kit::codes(&reply), [None], "{record_bytes} bytes over {connections}");
            let mut memory = vec![0xee; content.len()];
            get_into(&*link, &config, record, &content, &mut memory, soon()).expect("nothing is cut");
        }
        println!("{record_bytes} bytes in pieces of at most {}: {:?}", manners.piece_max, began.elapsed());
    }
}

pub fn cut_gets() {
    let mut rng = Rng::seeded();
    let config = SampleConfig { record_bytes: MIB / 2, readable: 1, writable: 0, ..Default::default() };
    let (content, owner) = (config.content(0), OwnerProcess::start(&config));
    let punctual = Punctual::new();
    let mut memory = vec![0; 4 * content.len()];
    let (mut right, mut failed, mut longest) = (0, 0, Duration::ZERO);
    let cuts = count(200, 3000);
    // One proxy and link for some of them: a link that was cut is used again.
    while right + failed < cuts {
        let cut_within = Some(rng.within(100, 3 * memory.len() as u64));
        let proxy = Proxy::start(owner.address(), Manners { cut_within, ..WELL }, rng.fork());
        let connections = rng.within(1, 4) as usize;
        let Ok(link) = open(&[proxy.address], connections, soon()) else { continue };
        for _ in 0..4 {
            memory.fill(0xee);
            punctual.reset();
            let (began, deadline) = (Instant::now(), in_ms(3000));
            match get_into(&*link, &config, 0, &content, &mut memory, deadline) {
                Ok(()) => right += 1,
                Err(error) => {
                    check_typed(&error);
                    failed += 1;
                }
            }
            punctual.check(deadline, "a get whose stream was cut");
            longest = longest.max(began.elapsed());
        }
    }
    println!("{right} gets right, {failed} failed, the longest took {longest:?}");
    assert!(right > 0 && failed > 0);
}

pub fn cut_puts() {
    let mut rng = Rng::seeded();
    let records = count(40, 400);
    let config =
        SampleConfig { record_bytes: MIB + 100, readable: 1, writable: records, ..Default::default() };
    let (content, owner) = (config.content(9), OwnerProcess::start(&config));
    let direct = link(owner.address(), 1);
    let punctual = Punctual::new();
    let (mut right, mut failed, mut busy) = (0, 0, 0);
    for record in 1..=records {
        let cut_within = Some(rng.within(300, 4 * content.len() as u64));
        let proxy = Proxy::start(owner.address(), Manners { cut_within, ..WELL }, rng.fork());
        let Ok(cut) = open(&[proxy.address], 2, soon()) else { continue };
        let mut ops = [Op::put(config.target(record), 0, &content)];
        punctual.reset();
        let deadline = in_ms(3000);
        let result = run(&*cut, &mut ops, deadline);
        punctual.check(deadline, "a put whose stream was cut");
        match result {
            Ok(()) => right += 1,
            Err(error) => {
                check_typed(&error);
                failed += 1;
                // What was begun can be brought to its end by another way.
                let mut again = [Op::put(config.target(record), 0, &content)];
                run(&*direct, &mut again, soon()).expect("nothing is cut");
                assert_eq!(again[0].outcome(), Some(Ok(())));
            }
        }
        let root = config.digest_context(record).payload(&content, |_| ());
        let until = in_ms(3000);
        let codes = loop {
            let body = config.commit_body(record, root);
            let reply = call(&*direct, FrameKind::Commit, body, soon()).expect("a call");
            let codes = crate::kit::codes(&reply);
            // What was cut may still be coming in: the node has not read the end of that stream.
            if codes != [Some(ErrorCode::Busy)] || Instant::now() > until {
                break codes;
            }
            busy += 1;
        };
        assert_eq!(codes, [None], "what the node has is what was put");
    }
    println!("{right} puts right, {failed} failed and put again; {busy} commits came too early");
}

/// Bytes that flow, however slowly, are no silence.
pub fn slow_is_not_stalled() {
    let mut rng = Rng::seeded();
    let config = SampleConfig { record_bytes: 4 * MIB, readable: 1, writable: 2, ..Default::default() };
    let (content, owner) = (config.content(0), OwnerProcess::start(&config));
    let manners = Manners { piece_max: 32 << 10, buffer: Some(64 << 10), rate: Some(2 << 20), ..WELL };
    let proxy = Proxy::start(owner.address(), manners, rng.fork());
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
