//! The decoder enforces every rule between the fields of a record: the test patches encoded bytes so that exactly
//! this rule is violated. The table is compared with the sources, so that no rule is missing.

mod generate;

use std::collections::BTreeSet;

use generate::Gen;
use moontide_proto::limits::*;
use moontide_proto::*;
use moontide_types::limits::*;
use moontide_types::record::State;
use moontide_types::{Generation, Medium, SegmentId, SlotId};

/// Fields with their new values, then the rule that this violates.
type Case<'a> = (&'a [(&'a str, u64)], &'a str);

#[derive(Default)]
struct Table(BTreeSet<(&'static str, String)>);

impl Table {
    fn check<T: FixedRecord + std::fmt::Debug + PartialEq>(&mut self, valid: T, cases: &[Case<'_>]) {
        let mut bytes = vec![];
        valid.encode(&mut bytes);
        assert_eq!(T::decode(&bytes), Ok(valid));
        for (patches, broken) in cases {
            let mut bytes = bytes.clone();
            for (name, value) in *patches {
                let field = T::FIELDS.iter().find(|f| f.name == *name).expect("the field exists");
                let width = field.bytes.min(8);
                bytes[field.offset..][..width].copy_from_slice(&value.to_le_bytes()[..width]);
            }
            match T::decode(&bytes) {
                Err(RecordError::Relation { record, rule }) => {
                    assert_eq!((record, rule), (T::NAME, *broken), "{patches:?}");
                    self.0.insert((record, rule.into()));
                }
                other => panic!("{} with {patches:?}: {other:?}, not {broken:?}", T::NAME),
            }
        }
    }
}

fn extent(start: u32, units: u32) -> u64 {
    u64::from(units) << 32 | u64::from(start)
}

/// Returns the rules in the sources, by record.
fn rules_in_sources() -> BTreeSet<(&'static str, String)> {
    let sources = [
        include_str!("../src/records/transfer_op.rs"),
        include_str!("../src/hello.rs"),
        include_str!("../src/records/object.rs"),
        include_str!("../src/records/put.rs"),
        include_str!("../src/records/command.rs"),
        include_str!("../src/records/report.rs"),
    ];
    let mut rules = BTreeSet::new();
    for source in sources {
        let mut record = "";
        let mut rest = source;
        while let Some((before, after)) = rest.split_once("Self::rule(") {
            if let Some((_, named)) = before.rsplit_once("\nimpl ") {
                record = named.split_once(' ').unwrap().0;
            }
            rules.insert((record, after.split('"').nth(1).unwrap().into()));
            rest = after;
        }
    }
    rules
}

#[test]
fn decoder_enforces_every_record_rule() {
    let table = &mut Table::default();
    operations(table);
    hello(table);
    objects(table);
    puts(table);
    commands(table);
    reports(table);
    assert_eq!(table.0, rules_in_sources(), "table and sources differ");
}

fn operations(table: &mut Table) {
    let (read, load, disk) = (OpKind::Read as u64, OpKind::Load as u64, OpFlags::DISK.bits().into());
    let ops = || (0..).map(|seed| Gen::new(seed).transfer_op());
    let valid = ops().find(|op| op.kind == OpKind::Write).unwrap();
    let valid = TransferOp { flags: OpFlags::NONE, segment: SegmentId(1), offset: 0, len: 1, ..valid };
    let no_slot = [("segment", 0), ("generation", 0), ("slot", 0)];
    table.check(
        valid,
        &[
            (&[("stripe", STRIPES_MAX as u64)], "stripe < STRIPES_MAX"),
            (&[("len", FRAME_PAYLOAD_BYTES_MAX + 1)], "len ≤ FRAME_PAYLOAD_BYTES_MAX"),
            (&[("offset", OBJECT_BYTES_MAX)], "offset + len ≤ OBJECT_BYTES_MAX"),
            (&[("offset", u64::MAX)], "offset + len ≤ OBJECT_BYTES_MAX"),
            (&[("kind", read), ("flags", disk)], "a disk operation names no slot"),
            (&[("flags", disk), no_slot[0], no_slot[1], no_slot[2]], "a disk operation is a Read or a Load"),
            (&[("kind", load)], "a load is from disk"),
            (&[("flags", OpFlags::DIGESTS.bits().into())], "digests are not written"),
        ],
    );
    let valid = TransferOp {
        kind: OpKind::Read,
        flags: OpFlags::DISK,
        segment: SegmentId(0),
        generation: Generation(0),
        slot: SlotId(0),
        ..valid
    };
    let rule = "a disk operation names no slot";
    table.check(valid, &[(&[("segment", 1)], rule), (&[("generation", 1)], rule), (&[("slot", 1)], rule)]);
    let rule = "a disk operation is within one part";
    table.check(
        valid,
        &[
            (&[("len", DISK_PART_BYTES + 1)], rule),
            (&[("offset", DISK_PART_BYTES - 1), ("len", 2)], rule),
            (&[("offset", 3 * DISK_PART_BYTES + 1), ("len", DISK_PART_BYTES)], rule),
        ],
    );
}

fn hello(table: &mut Table) {
    let rule = "1 ≤ lowest version ≤ highest";
    table.check(
        Gen::new(1).hello(),
        &[
            (&[("versions", 0x0001_0000)], rule),
            (&[("versions", 0x0001_0002)], rule),
            (&[("inflight_max", 0)], "inflight_max > 0"),
        ],
    );
}

fn objects(table: &mut Table) {
    let (entry, _) = Gen::new(1).whole_object();
    let valid = ObjectEntry { replica_count: 2, handle_count: 2, ..entry };
    table.check(
        valid,
        &[
            (&[("format", 1)], "format = 0"),
            (&[("object_len", OBJECT_BYTES_MAX + 1)], "object_len ≤ OBJECT_BYTES_MAX"),
            (&[("valid_ms", (VALID_MS_MAX + 1).into())], "valid_ms ≤ VALID_MS_MAX"),
            (&[("replica_count", REPLICAS_MAX as u64 + 1)], "replica_count ≤ REPLICAS_MAX"),
            (&[("handle_count", 2 * STRIPES_MAX as u64 + 1)], "handle_count ≤ replica_count × STRIPES_MAX"),
            (&[("handle_count", 0)], "an object with replicas has a handle"),
            (&[("code", 1)], "either a code or replicas"),
            (&[("replica_count", 0), ("handle_count", 0)], "either a code or replicas"),
        ],
    );

    let stripe = Stripe { index: 0, count: 1, offset: 0, len: 1000 };
    let handles =
        |medium| (0..).map(|seed| Gen::new(seed).handle(stripe, 0)).find(|h| h.medium == medium).unwrap();
    let valid = Handle {
        extent: moontide_types::Extent { start: 8, units: 2 },
        payload_offset: 8 * UNIT_BYTES,
        ..handles(Medium::Memory)
    };
    let (stripes, payload) = ("the stripe is in bounds", "the payload lies in the extent");
    table.check(
        valid,
        &[
            (&[("stripe_index", 1)], stripes),
            (&[("stripe_count", 0)], stripes),
            (&[("stripe_count", STRIPES_MAX as u64 + 1)], stripes),
            (&[("stripe_count", 2), ("stripe_offset", 1)], stripes),
            (&[("stripe_count", 2), ("stripe_offset", OBJECT_BYTES_MAX)], stripes),
            (&[("stripe_len", OBJECT_BYTES_MAX + 1)], stripes),
            (&[("replica", REPLICAS_MAX as u64)], "replica < REPLICAS_MAX"),
            (&[("extent", extent(8, 0))], "extent.units > 0"),
            (&[("payload_offset", 8 * UNIT_BYTES - 1)], payload),
            (&[("payload_offset", 8 * UNIT_BYTES + 25)], payload),
            (&[("payload_offset", u64::MAX)], payload),
        ],
    );
    let rule = "a disk handle names no slot";
    table.check(
        handles(Medium::Disk),
        &[
            (&[("segment", 1)], rule),
            (&[("slot", 1)], rule),
            (&[("generation", 1)], rule),
            (&[("extent", 1)], rule),
            (&[("payload_offset", 1)], rule),
        ],
    );
}

fn puts(table: &mut Table) {
    table.check(
        Gen::new(1).put_entry(),
        &[
            (&[("len", OBJECT_BYTES_MAX + 1)], "len ≤ OBJECT_BYTES_MAX"),
            (&[("config", CONFIGS_MAX as u64)], "config < CONFIGS_MAX"),
        ],
    );
    let valid =
        PutEndEntry { outcomes: [None; REPLICAS_MAX], replica_count: 1, ..Gen::new(1).put_end_entry() };
    let (replicas, stripes) = ("1 ≤ replica_count ≤ REPLICAS_MAX", "1 ≤ stripe_count ≤ STRIPES_MAX");
    table.check(
        valid,
        &[
            (&[("replica_count", 0)], replicas),
            (&[("replica_count", REPLICAS_MAX as u64 + 1)], replicas),
            (&[("stripe_count", 0)], stripes),
            (&[("stripe_count", STRIPES_MAX as u64 + 1)], stripes),
            (&[("outcomes", 1 << 16)], "no outcome beyond the replicas"),
        ],
    );
}

fn commands(table: &mut Table) {
    let command =
        |kind| (0..).map(|seed| Gen::new(seed).command()).find(|command| command.kind == kind).unwrap();
    let unused = "fields that the kind does not use are zero";
    for &kind in CommandKind::ALL {
        use CommandKind::*;
        let mut cases: Vec<Case<'_>> = vec![];
        if !matches!(kind, Offload | Promote | Copy) {
            cases.push((&[("lease_ms", 1)], unused));
        }
        if !matches!(kind, Promote | Copy) {
            cases.extend([
                (&[("stripe", 1)][..], unused),
                (&[("extent", 1)], unused),
                (&[("payload_offset", 1)], unused),
            ]);
        }
        if kind != AdoptTerm {
            cases.push((&[("group", 1)], unused));
        }
        if !matches!(kind, Kill | DropFromDisk) {
            cases.push((&[("flags", 1)], unused));
        }
        if kind == DropFromDisk {
            cases.extend([
                (&[("segment", 1)][..], unused),
                (&[("generation", 1)], unused),
                (&[("slot", 1)], unused),
            ]);
        }
        if matches!(kind, AdoptTerm | Drain) {
            cases.extend([(&[("slot", 1)][..], unused), (&[("epoch", 1)], unused), (&[("id", 1)], unused)]);
        }
        if kind == FenceEpoch {
            cases.push((&[("id", 1)], unused));
        }
        table.check(command(kind), &cases);
    }
    table.check(
        command(CommandKind::Promote),
        &[
            (&[("lease_ms", (LEASE_MS_MAX + 1).into())], "lease_ms ≤ LEASE_MS_MAX"),
            (&[("stripe", STRIPES_MAX as u64)], "stripe < STRIPES_MAX"),
            (&[("payload_offset", u64::MAX)], "the payload starts in the extent"),
            (&[("extent", extent(8, 1)), ("payload_offset", 0)], "the payload starts in the extent"),
        ],
    );
    table.check(Gen::new(1).copy_source(), &[(&[("node", 0)], "node > 0")]);
    let rule = "a code if and only if refused";
    let valid = CommandResult { code: None, status: CommandStatus::Done, ..Gen::new(1).command_result() };
    table.check(
        valid,
        &[(&[("code", 1)], rule), (&[("status", CommandStatus::Refused.number().into())], rule)],
    );
}

fn reports(table: &mut Table) {
    let (stripes, payload) = ("the stripe is in bounds", "the payload lies in the extent");
    let record = |state| {
        (0..)
            .map(|seed| Gen::new(seed).report_record())
            .find(|r| r.stripe_count == 1 && r.word.state() == state)
            .unwrap()
    };
    let valid = ReportRecord {
        extent: moontide_types::Extent { start: 8, units: 2 },
        payload_offset: 8 * UNIT_BYTES,
        object_len: 1000,
        stripe_len: 1000,
        ..record(State::Ready)
    };
    table.check(
        valid,
        &[
            (&[("object_len", 999)], stripes),
            (&[("object_len", OBJECT_BYTES_MAX + 1), ("stripe_len", OBJECT_BYTES_MAX + 1)], stripes),
            (&[("stripe_index", 1)], stripes),
            (&[("stripe_count", 0)], stripes),
            (&[("extent", extent(8, 0))], "extent.units > 0"),
            (&[("payload_offset", 0)], payload),
            (&[("payload_offset", u64::MAX)], payload),
        ],
    );
    let free = ReportRecord::free(valid.slot, valid.word.epoch());
    let only_epoch = "a FREE record has only slot and epoch";
    let names = ReportRecord::FIELDS.iter().map(|field| field.name);
    for name in names.filter(|name| !["slot", "word", "reserved"].contains(name)) {
        table.check(free, &[(&[(name, 1)], only_epoch)]);
    }

    let valid = OffloadRecord {
        object_len: 1000,
        stripe_offset: 0,
        stripe_len: 1000,
        stripe_index: 0,
        stripe_count: 1,
        offset: 0,
        disk_len: 4096,
        ..Gen::new(1).offload_record()
    };
    table.check(
        valid,
        &[
            (&[("object_len", 999)], stripes),
            (&[("stripe_index", 1)], stripes),
            (&[("offset", u64::MAX)], "offset + disk_len fits in 64 bits"),
            (&[("disk_len", 2 * OBJECT_BYTES_MAX + 1)], "disk_len ≤ 2 × OBJECT_BYTES_MAX"),
            (&[("disk_len", 999)], "the payload fits in the record"),
        ],
    );
}

/// Decoder and encoder reject values out of range.
#[test]
fn out_of_range_ids_in_records_are_rejected() {
    fn refused<T: FixedRecord + std::fmt::Debug>(valid: T, name: &str, value: u64, number: u64) {
        let mut bytes = vec![];
        valid.encode(&mut bytes);
        let field = T::FIELDS.iter().find(|f| f.name == name).unwrap();
        bytes[field.offset..][..field.bytes].copy_from_slice(&value.to_le_bytes()[..field.bytes]);
        match T::decode(&bytes) {
            Err(RecordError::Value { field, found, .. }) => assert_eq!((field, found), (name, number)),
            other => panic!("{}.{name}: {other:?}", T::NAME),
        }
    }
    let (segments, slots) = (SEGMENTS_PER_NODE_MAX.into(), SLOTS_PER_SEGMENT_MAX.into());
    let g = &mut Gen::new(1);
    let handle = g.handle(Stripe { index: 0, count: 1, offset: 0, len: 1 }, 0);
    refused(g.transfer_op(), "segment", segments, segments);
    refused(g.transfer_op(), "slot", slots, slots);
    refused(handle, "segment", segments, segments);
    refused(handle, "slot", slots, slots);
    refused(handle, "extent", extent(u32::MAX, 1), 1 << 32);
    refused(g.commit_entry(), "segment", segments, segments);
    refused(g.commit_entry(), "slot", slots, slots);
    refused(g.command(), "segment", segments, segments);
    refused(g.command(), "slot", slots, slots);
    refused(g.command(), "group", GROUPS_MAX.into(), GROUPS_MAX.into());
    refused(g.command(), "extent", extent(1, u32::MAX), 1 << 32);
    refused(g.report_record(), "slot", slots, slots);
    refused(g.report_record(), "extent", extent(u32::MAX, u32::MAX), 2 * u64::from(u32::MAX));
    let valid = CommitEntry { slot: SlotId(SLOTS_PER_SEGMENT_MAX - 1), ..g.commit_entry() };
    assert_eq!(valid.validate(), Ok(()));
    let broken = CommitEntry { slot: SlotId(SLOTS_PER_SEGMENT_MAX), ..valid };
    assert!(matches!(broken.validate(), Err(RecordError::Value { field: "slot", .. })));
}
