//! What must hold after every step, by the plainest means.

use std::collections::BTreeSet;

use moontide_meta::{Ask, Audit, Medium, PlaceView, ReportState, SegmentPhase};
use moontide_types::bounds::UNIT_BYTES;
use moontide_types::{Epoch, Extent, Key};

use crate::node::SegmentModel;
use crate::world::{Check, KEYS, PutModel, World, ensure, id_of, key_of, tenant_of};

fn apart(a: Extent, b: Extent) -> bool {
    a.end() <= u64::from(b.start) || b.end() <= u64::from(a.start)
}

/// All of it.
pub(crate) fn check(world: &mut World) -> Check {
    let audit = world.group.audit(world.now).map_err(|violation| format!("audit: {violation}"))?;
    for view in world.group.segments() {
        let sum = view.live_units + view.reserved_units + view.draining_units + view.free_units;
        ensure!(sum == view.units, "{view:?} does not add up");
    }
    let mut names: Vec<_> = world.group.segments().map(|view| (view.node, view.segment)).collect();
    names.sort();
    for node in &world.nodes {
        for segment in node.segments.iter().filter(|segment| segment.mount.is_some()) {
            let name = (node.id, segment.id);
            let view = world.group.find_segment(node.id, segment.id).ok_or("a mounted segment is unknown")?;
            // A lost incarnation of the same name may still be listed beside this one.
            if names.iter().filter(|&&other| other == name).count() > 1
                || view.phase == SegmentPhase::Reporting
            {
                continue;
            }
            let ranges: Vec<_> =
                audit.ranges.iter().filter(|range| (range.node, range.segment) == name).collect();
            for (at, a) in ranges.iter().enumerate() {
                ensure!(a.extent.end() <= u64::from(segment.units), "{a:?} is out of bounds");
                for b in &ranges[..at] {
                    ensure!(apart(a.extent, b.extent) && a.slot != b.slot, "{a:?} and {b:?} overlap");
                }
            }
            for (slot, word) in (0u32..).zip(&segment.words) {
                if word.is_free() {
                    continue;
                }
                let known = ranges.iter().any(|range| (range.slot.0, range.epoch) == (slot, word.epoch));
                ensure!(
                    known,
                    "slot {slot} of segment {name:?} is {:?}({}), and free for the group",
                    word.state,
                    word.epoch
                );
            }
        }
    }
    for key in 0..KEYS {
        check_key(world, key, &audit)?;
    }
    Ok(())
}

/// What is found may be found, and what must be found is.
fn check_key(world: &mut World, key: u8, audit: &Audit) -> Check {
    let bytes = key_of(key);
    let ask = Ask { id: id_of(key), key: Key::new(&bytes).unwrap() };
    let detail = world.group.query(world.now, &ask);
    if let Some(detail) = detail.as_ref().filter(|detail| !detail.writing) {
        may_be_read(world, key, detail.epoch, detail.object_len, detail.root, &[])?;
        let put = world.put_of(key, detail.epoch).expect("may_be_read found it");
        if world.puts[put].stripes == 1 {
            may_be_read(world, key, detail.epoch, detail.object_len, detail.root, &detail.places)?;
        }
    }
    if let Some(expected) = must_find(world, key, audit) {
        let found = detail.as_ref().filter(|detail| !detail.writing);
        ensure!(found.is_some_and(|found| found.epoch >= expected), "{expected} must be found: {detail:?}");
    }
    Ok(())
}

/// The highest version with a replica of which the group knows that all of it is READY, and that it has not given up.
fn must_find(world: &World, key: u8, audit: &Audit) -> Option<Epoch> {
    // A version that another one has replaced, or a stripe that has lost its siblings, drains; while it is leased, no
    // order says so.
    let drains = |place: &PlaceView, epoch: Epoch| {
        audit.ranges.iter().any(|range| {
            range.draining
                && (range.node, range.segment, range.slot, range.epoch)
                    == (place.node, place.segment, place.slot, epoch)
        })
    };
    let puts = world
        .puts
        .iter()
        .filter(|put| put.key == key && !put.removed && put.expires.is_none_or(|at| at > world.now.unix));
    let complete = puts.filter(|put| {
        (0..put.places.len() / put.stripes).any(|replica| {
            (0..put.stripes).all(|stripe| {
                if world.is_known_on_disk((id_of(key), put.epoch, stripe as u16), audit) {
                    return true;
                }
                let which = replica * put.stripes + stripe;
                let place = &put.places[which];
                let (node, at) = world.position(place.node, place.segment);
                let segment = &world.nodes[node].segments[at];
                let reported = segment.mount.as_ref().is_some_and(|mount| mount.number != put.mounts[which]);
                (put.acked || reported)
                    && is_known_ready(segment, place, put.epoch)
                    && !drains(place, put.epoch)
            })
        })
    });
    complete.map(|put| put.epoch).max()
}

/// Whether a node has come back with the put: what is READY then counts, whether its writer has said so or not.
pub(crate) fn was_reported(world: &World, put: &PutModel) -> bool {
    put.places.iter().zip(&put.mounts).any(|(place, &given_in)| {
        let (node, at) = world.position(place.node, place.segment);
        world.nodes[node].segments[at].mount.as_ref().is_some_and(|mount| mount.number != given_in)
    })
}

fn is_known_ready(segment: &SegmentModel, place: &PlaceView, epoch: Epoch) -> bool {
    let slot = place.slot.0;
    let word = &segment.words[slot as usize];
    segment.generation == place.generation
        && (word.epoch, word.state) == (epoch, ReportState::Ready)
        && segment.mount.as_ref().is_some_and(|mount| {
            mount.known_ready.get(&slot) == Some(&epoch) && !mount.ordered.contains(&(slot, epoch))
        })
}

/// A reader was told this: the version was written, is not removed, and is READY in all of these places.
pub(crate) fn may_be_read(
    world: &mut World,
    key: u8,
    epoch: Epoch,
    len: u64,
    root: u64,
    places: &[PlaceView],
) -> Check {
    let at = world.put_of(key, epoch).ok_or_else(|| format!("{epoch} of key {key} was never given"))?;
    let put = &world.puts[at];
    ensure!(put.acked || put.seen || was_reported(world, put), "{epoch} is found, but its put has not ended");
    ensure!(!put.removed, "{epoch} of key {key} was removed, and is back");
    ensure!(!put.removal_pending, "{epoch} of key {key} was being removed, and is back");
    ensure!(put.expires.is_none_or(|expires| expires > world.now.unix), "{epoch} has expired");
    ensure!((len, root) == (put.object_len, put.root()), "{epoch}: length {len}, root {root:x}");
    let mut nodes = BTreeSet::new();
    for place in places {
        ensure!(
            put.stripes > 1 || nodes.insert((place.node, place.medium)),
            "{epoch} has two replicas on node {}",
            place.node
        );
        if place.medium == Medium::Disk {
            world.may_be_read_from_disk(epoch, id_of(key), place)?;
            continue;
        }
        let (node, segment) = world.position(place.node, place.segment);
        let segment = &world.nodes[node].segments[segment];
        ensure!(
            segment.mount.is_some() && segment.generation == place.generation,
            "{epoch}: {place:?} is away"
        );
        let word = &segment.words[place.slot.0 as usize];
        let there = word.epoch == epoch && (word.state == ReportState::Ready || word.scrubbed);
        ensure!(there, "{epoch}: {place:?} is {:?}({})", word.state, word.epoch);
        let record = word.record.as_ref().ok_or("a word without a record")?;
        ensure!(
            (record.extent, record.stripe) == (place.extent, place.stripe),
            "{epoch}: {place:?} is not {record:?}"
        );
        ensure!(place.root == record.root, "{epoch}: the root of {place:?} is {:x}", record.root);
    }
    world.puts[at].seen = true;
    Ok(())
}

/// A put was given this: its segment may be used, the node has nothing there, and nobody may read it.
pub(crate) fn may_be_given(world: &World, place: &PlaceView) -> Check {
    let (node, at) = world.position(place.node, place.segment);
    let segment = &world.nodes[node].segments[at];
    let mount = segment.mount.as_ref().ok_or_else(|| format!("{place:?} was given, but is away"))?;
    ensure!(segment.generation == place.generation, "{place:?} is of another incarnation");
    ensure!(mount.ended, "{place:?} was given before the report's end");
    ensure!(mount.usable_at <= world.now.mono, "{place:?} was given before {:?}", mount.usable_at);
    ensure!(place.extent.end() <= u64::from(segment.units), "{place:?} is out of bounds");
    for word in segment.words.iter().filter(|word| !word.is_free()) {
        let taken = word.record.as_ref().ok_or("a word without a record")?.extent;
        ensure!(
            apart(taken, place.extent),
            "{place:?} was given, but the node has {}: {:?}",
            word.epoch,
            word.state
        );
    }
    let word = &segment.words[place.slot.0 as usize];
    ensure!(word.is_free(), "{place:?} was given, but its slot is {:?}", word.state);
    let leased = world.leases.iter().find(|lease| {
        (lease.node, lease.segment, lease.generation) == (place.node, place.segment, place.generation)
            && lease.until > world.now.mono
            && !apart(lease.extent, place.extent)
    });
    ensure!(leased.is_none(), "{place:?} was given, but {leased:?}");
    Ok(())
}

/// Bytes and objects of a tenant, summed over all ranges that do not drain.
pub(crate) fn usage(world: &World, tenant: u8) -> Result<(u64, u64), String> {
    let audit = world.group.audit(world.now).map_err(|violation| format!("audit: {violation}"))?;
    let own = audit.ranges.iter().filter(|range| !range.draining && tenant_of(range.id.0[0] - 1) == tenant);
    let (mut units, mut ids) = (0, BTreeSet::new());
    for range in own {
        units += u64::from(range.extent.units);
        ids.insert(range.id);
    }
    Ok((units * UNIT_BYTES, ids.len() as u64))
}
