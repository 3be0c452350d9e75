//! Conditions after every step, checked in the simplest way.

use std::collections::BTreeSet;

use moontide_meta::{Audit, LookupKey, ReportState, SegmentPhase, StripeLocation};
use moontide_types::limits::UNIT_BYTES;
use moontide_types::{Epoch, Extent, Key, Medium};

use crate::harness::{Check, KEYS, ModelHarness, PutModel, ensure, id_of, key_of, tenant_of};
use crate::node::SegmentModel;

fn apart(a: Extent, b: Extent) -> bool {
    a.end() <= u64::from(b.start) || b.end() <= u64::from(a.start)
}

/// Checks all conditions.
pub(crate) fn check(harness: &mut ModelHarness) -> Check {
    let audit = harness.group.audit(harness.now).map_err(|violation| format!("audit: {violation}"))?;
    for view in harness.group.segments() {
        let sum = view.live_units + view.reserved_units + view.draining_units + view.free_units;
        ensure!(sum == view.units, "wrong sum of units: {view:?}");
    }
    let mut names: Vec<_> = harness.group.segments().map(|view| (view.node, view.segment)).collect();
    names.sort();
    for node in &harness.nodes {
        for segment in node.segments.iter().filter(|segment| segment.mount.is_some()) {
            let name = (node.id, segment.id);
            let view = harness
                .group
                .find_segment(node.id, segment.id)
                .ok_or("group does not know a mounted segment")?;
            // A lost incarnation of the same name may still be listed next to this one.
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
                let found = ranges.iter().any(|range| (range.slot.0, range.epoch) == (slot, word.epoch));
                ensure!(
                    found,
                    "slot {slot} of segment {name:?} is {:?}({}), but free in the group",
                    word.state,
                    word.epoch
                );
            }
        }
    }
    for key in 0..KEYS {
        check_key(harness, key, &audit)?;
    }
    Ok(())
}

/// Checks that a found version may be found, and that a version that must be found is.
fn check_key(harness: &mut ModelHarness, key: u8, audit: &Audit) -> Check {
    let bytes = key_of(key);
    let lookup = LookupKey { id: id_of(key), key: Key::new(&bytes).unwrap() };
    let detail = harness.group.query(harness.now, &lookup);
    if let Some(detail) = detail.as_ref().filter(|detail| !detail.writing) {
        may_be_read(harness, key, detail.epoch, detail.object_len, detail.root, &[])?;
        let put = harness.put_of(key, detail.epoch).expect("may_be_read found it");
        if harness.puts[put].stripes == 1 {
            may_be_read(harness, key, detail.epoch, detail.object_len, detail.root, &detail.locations)?;
        }
    }
    if let Some(expected) = must_find(harness, key, audit) {
        let found = detail.as_ref().filter(|detail| !detail.writing);
        ensure!(found.is_some_and(|found| found.epoch >= expected), "{expected} must be found: {detail:?}");
    }
    Ok(())
}

/// Returns the highest version with a replica that the group knows to be completely READY, and has not released.
fn must_find(harness: &ModelHarness, key: u8, audit: &Audit) -> Option<Epoch> {
    // A replaced version, or a stripe without its other stripes, drains; while it is leased, there is no command.
    let drains = |location: &StripeLocation, epoch: Epoch| {
        audit.ranges.iter().any(|range| {
            range.draining
                && (range.node, range.segment, range.slot, range.epoch)
                    == (location.node, location.segment, location.slot, epoch)
        })
    };
    let puts = harness
        .puts
        .iter()
        .filter(|put| put.key == key && !put.removed && put.expires.is_none_or(|at| at > harness.now.unix));
    let complete = puts.filter(|put| {
        (0..put.locations.len() / put.stripes).any(|replica| {
            (0..put.stripes).all(|stripe| {
                if harness.master_knows_on_disk((id_of(key), put.epoch, stripe as u16), audit) {
                    return true;
                }
                let index = replica * put.stripes + stripe;
                let location = &put.locations[index];
                let (node, at) = harness.position(location.node, location.segment);
                let segment = &harness.nodes[node].segments[at];
                let reported = segment.mount.as_ref().is_some_and(|mount| mount.number != put.mounts[index]);
                (put.acked || reported)
                    && is_known_ready(segment, location, put.epoch)
                    && !drains(location, put.epoch)
            })
        })
    });
    complete.map(|put| put.epoch).max()
}

/// Whether a node has reported the put: then READY locations count without a PutEnd.
pub(crate) fn was_reported(harness: &ModelHarness, put: &PutModel) -> bool {
    put.locations.iter().zip(&put.mounts).any(|(location, &granted_in)| {
        let (node, at) = harness.position(location.node, location.segment);
        harness.nodes[node].segments[at].mount.as_ref().is_some_and(|mount| mount.number != granted_in)
    })
}

fn is_known_ready(segment: &SegmentModel, location: &StripeLocation, epoch: Epoch) -> bool {
    let slot = location.slot.0;
    let word = &segment.words[slot as usize];
    segment.generation == location.generation
        && (word.epoch, word.state) == (epoch, ReportState::Ready)
        && segment.mount.as_ref().is_some_and(|mount| {
            mount.known_ready.get(&slot) == Some(&epoch) && !mount.commanded.contains(&(slot, epoch))
        })
}

/// Checks a response to a reader: the version was written, is not removed, and is READY in all of these locations.
pub(crate) fn may_be_read(
    harness: &mut ModelHarness,
    key: u8,
    epoch: Epoch,
    len: u64,
    root: u64,
    locations: &[StripeLocation],
) -> Check {
    let at = harness.put_of(key, epoch).ok_or_else(|| format!("{epoch} of key {key} was never granted"))?;
    let put = &harness.puts[at];
    ensure!(put.acked || put.seen || was_reported(harness, put), "{epoch} found before its PutEnd");
    ensure!(!put.removed, "removed {epoch} of key {key} reappeared");
    ensure!(!put.removal_pending, "{epoch} of key {key} reappeared while its removal is pending");
    ensure!(put.expires.is_none_or(|expires| expires > harness.now.unix), "{epoch} has expired");
    ensure!((len, root) == (put.object_len, put.root()), "{epoch}: length {len}, root {root:x}");
    let mut nodes = BTreeSet::new();
    for location in locations {
        ensure!(
            put.stripes > 1 || nodes.insert((location.node, location.medium)),
            "{epoch} has two replicas on node {}",
            location.node
        );
        if location.medium == Medium::Disk {
            harness.may_be_read_from_disk(epoch, id_of(key), location)?;
            continue;
        }
        let (node, segment) = harness.position(location.node, location.segment);
        let segment = &harness.nodes[node].segments[segment];
        ensure!(
            segment.mount.is_some() && segment.generation == location.generation,
            "{epoch}: {location:?} is not mounted"
        );
        let word = &segment.words[location.slot.0 as usize];
        let is_ready = word.epoch == epoch && (word.state == ReportState::Ready || word.scrubbed);
        ensure!(is_ready, "{epoch}: {location:?} is {:?}({})", word.state, word.epoch);
        let record = word.record.as_ref().ok_or("word has no record")?;
        ensure!(
            (record.extent, record.stripe) == (location.extent, location.stripe),
            "{epoch}: {location:?} does not match {record:?}"
        );
        ensure!(location.root == record.root, "{epoch}: root of {location:?} is {:x}", record.root);
    }
    harness.puts[at].seen = true;
    Ok(())
}

/// Checks a grant: the segment may be used, the node has nothing there, and no reader may read it.
pub(crate) fn may_be_granted(harness: &ModelHarness, location: &StripeLocation) -> Check {
    let (node, at) = harness.position(location.node, location.segment);
    let segment = &harness.nodes[node].segments[at];
    let mount = segment.mount.as_ref().ok_or_else(|| format!("{location:?} granted, but not mounted"))?;
    ensure!(segment.generation == location.generation, "{location:?} has another generation");
    ensure!(mount.ended, "{location:?} granted before the end of the report");
    ensure!(mount.usable_at <= harness.now.mono, "{location:?} granted before {:?}", mount.usable_at);
    ensure!(location.extent.end() <= u64::from(segment.units), "{location:?} is out of bounds");
    for word in segment.words.iter().filter(|word| !word.is_free()) {
        let taken = word.record.as_ref().ok_or("word has no record")?.extent;
        ensure!(
            apart(taken, location.extent),
            "{location:?} granted, but the node has {}: {:?}",
            word.epoch,
            word.state
        );
    }
    let word = &segment.words[location.slot.0 as usize];
    ensure!(word.is_free(), "{location:?} granted, but its slot is {:?}", word.state);
    let leased = harness.leases.iter().find(|lease| {
        (lease.node, lease.segment, lease.generation)
            == (location.node, location.segment, location.generation)
            && lease.until > harness.now.mono
            && !apart(lease.extent, location.extent)
    });
    ensure!(leased.is_none(), "{location:?} granted, but {leased:?}");
    Ok(())
}

/// Returns bytes and objects of a tenant, summed over all extents that do not drain.
pub(crate) fn usage(harness: &ModelHarness, tenant: u8) -> Result<(u64, u64), String> {
    let audit = harness.group.audit(harness.now).map_err(|violation| format!("audit: {violation}"))?;
    let extents =
        audit.ranges.iter().filter(|range| !range.draining && tenant_of(range.id.0[0] - 1) == tenant);
    let (mut units, mut ids) = (0, BTreeSet::new());
    for range in extents {
        units += u64::from(range.extent.units);
        ids.insert(range.id);
    }
    Ok((units * UNIT_BYTES, ids.len() as u64))
}
