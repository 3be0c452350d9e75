//! A disk that has changed bytes: the object is missing, the others are served, and an operator can find out which it was.

use std::os::unix::fs::FileExt;
use std::path::Path;

use moontide_disk::BackendKind;
use rustix::process::Signal;

use crate::common::expect;
use crate::content::Rng;
use crate::kit::{KIB, SOON, until};
use crate::readers::{Got, Object, Way, read};
use crate::scene::{Scene, Sizes, count_existing, on_disk, put_fast, read_fast};

#[test]
fn a_damaged_record_is_a_miss_and_the_others_are_served() {
    for backend in BackendKind::ALL {
        damaged_record(backend);
    }
}

fn damaged_record(backend: BackendKind) {
    let mut rng = Rng::seeded();
    let mut scene = Scene::start(backend, Sizes::times(16, 8), "");
    let store = scene.store(false);
    let objects: Vec<Object> =
        (0..100).map(|n| Object::new("whole", n, &mut rng, 300 * KIB..600 * KIB)).collect();
    put_fast(&[&store], &objects);
    let mut known = on_disk(&store, &objects);
    assert!(known.len() > 10, "only {} objects were on disk", known.len());
    scene.cluster.nodes[0].signal(Signal::TERM);
    until("the node ends", SOON, || scene.cluster.nodes[0].ended().is_some());

    let victim = known.swap_remove(rng.within(0, known.len()));
    let tier = scene.tier();
    let lines = expect(0, &["inspect", "disk", "--dir", &tier, "--all", "--json"], b"").json_lines();
    let line = lines.iter().find(|line| line["key"] == *victim.key).expect("it is on disk");
    let file = Path::new(&tier).join(line["file"].as_str().expect("its file"));
    let offset = line["offset"].as_u64().expect("where it stands");
    let file = std::fs::OpenOptions::new().read(true).write(true).open(file).expect("its file");
    let mut bytes = [0; 100];
    // In the middle of its payload, which is longer than everything in front of it.
    let at = offset + victim.len as u64 / 2;
    file.read_exact_at(&mut bytes, at).expect("bytes of it");
    file.write_all_at(&bytes.map(|byte| !byte), at).expect("other bytes");
    file.sync_all().expect("the disk");
    let told = expect(1, &["inspect", "disk", "--dir", &tier, "--verify"], b"");
    assert!(told.text().contains(&victim.key), "{} is not named:\n{}", victim.key, told.text());

    scene.cluster.restart_node(0);
    until("the others are there", SOON, || count_existing(&store, &known) == known.len());
    for way in [Way::Copy, Way::Batch, Way::Into, Way::Ref] {
        for store in [&store, &scene.store(true)] {
            let got = read(store, way, &victim);
            assert!(matches!(got, Got::Miss), "{backend}: damaged, and read by {way:?} it is {got:?}");
        }
    }
    let damaged = scene.node_metrics().node("disk_damaged_records_total");
    assert!(damaged > 0, "{backend}: nobody has noticed");
    let tally = read_fast(&store, &known);
    assert_eq!(tally.right(), known.len() as u64, "{backend}: {:?}", tally.lost().first());
    println!("{backend}: {damaged} damaged, {} others served", known.len());
    // Its key can be used again.
    let again = Object { seed: rng.draw(), ..victim };
    put_fast(&[&store], std::slice::from_ref(&again));
    assert!(matches!(read(&store, Way::Copy, &again), Got::Right));
    scene.cluster.end();
}
