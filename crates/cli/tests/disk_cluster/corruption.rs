//! A corrupt record on disk: its object is a miss, others are served, and `inspect disk` names it.

use std::os::unix::fs::FileExt;
use std::path::Path;

use moontide_disk::BackendKind;
use rustix::process::Signal;

use crate::common::expect;
use crate::content::Rng;
use crate::disk_harness::{DiskCluster, Sizes, count_existing, on_disk, put_fast, read_fast};
use crate::harness::{KIB, STEP_TIMEOUT, until};
use crate::readers::{Got, Object, Way, read};

#[test]
fn corrupt_record_is_a_miss_and_other_records_are_served() {
    for backend in BackendKind::ALL {
        corrupt_record(backend);
    }
}

fn corrupt_record(backend: BackendKind) {
    let mut rng = Rng::seeded();
    let mut cluster = DiskCluster::start(backend, Sizes::times(16, 8), "");
    let store = cluster.store(false);
    let objects: Vec<Object> =
        (0..100).map(|n| Object::new("whole", n, &mut rng, 300 * KIB..600 * KIB)).collect();
    put_fast(&[&store], &objects);
    let mut known = on_disk(&store, &objects);
    assert!(known.len() > 10, "only {} objects were on disk", known.len());
    cluster.cluster.nodes[0].signal(Signal::TERM);
    until("the node ends", STEP_TIMEOUT, || cluster.cluster.nodes[0].ended().is_some());

    let victim = known.swap_remove(rng.within(0, known.len()));
    let tier = cluster.tier();
    let lines = expect(0, &["inspect", "disk", "--dir", &tier, "--all", "--json"], b"").json_lines();
    let line = lines.iter().find(|line| line["key"] == *victim.key).expect("it is on disk");
    let file = Path::new(&tier).join(line["file"].as_str().expect("its file"));
    let offset = line["offset"].as_u64().expect("its offset");
    let file = std::fs::OpenOptions::new().read(true).write(true).open(file).expect("its file");
    let mut bytes = [0; 100];
    // In the middle of its payload, which is longer than its preamble.
    let at = offset + victim.len as u64 / 2;
    file.read_exact_at(&mut bytes, at).expect("bytes of it");
    file.write_all_at(&bytes.map(|byte| !byte), at).expect("other bytes");
    file.sync_all().expect("the disk");
    let output = expect(1, &["inspect", "disk", "--dir", &tier, "--verify"], b"");
    assert!(output.text().contains(&victim.key), "{} is not named:\n{}", victim.key, output.text());

    cluster.cluster.restart_node(0);
    until("the others are there", STEP_TIMEOUT, || count_existing(&store, &known) == known.len());
    for way in [Way::Copy, Way::Batch, Way::Into, Way::Ref] {
        for store in [&store, &cluster.store(true)] {
            let got = read(store, way, &victim);
            assert!(matches!(got, Got::Miss), "{backend}: corrupt object read by {way:?}: {got:?}");
        }
    }
    let corrupt = cluster.node_metrics().node("disk_corrupt_records_total");
    assert!(corrupt > 0, "{backend}: corruption was not counted");
    let tally = read_fast(&store, &known);
    assert_eq!(tally.right(), known.len() as u64, "{backend}: {:?}", tally.lost().first());
    println!("{backend}: {corrupt} corrupt, {} others served", known.len());
    // Its key can be used again.
    let again = Object { seed: rng.draw(), ..victim };
    put_fast(&[&store], std::slice::from_ref(&again));
    assert!(matches!(read(&store, Way::Copy, &again), Got::Right));
    cluster.cluster.end();
}
