//! Which keys a node accepts, and when it forgets them.

use moontide_proto::CapabilitySecret;
use moontide_types::{Epoch, Generation, NodeId, SegmentId, SlotId};

use super::*;

const GROUPS: NonZeroU16 = NonZeroU16::new(4).unwrap();
const NODE: NodeId = NodeId(5);

fn master(number: u32) -> (Term, CapabilitySecret) {
    (Term::new(number).unwrap(), CapabilitySecret::new([number as u8; 32]))
}

fn scope(id: ObjectId) -> CapabilityScope {
    CapabilityScope {
        right: AccessRight::Read,
        stripe: 0,
        segment: SegmentId(1),
        generation: Generation(2),
        slot: SlotId(3),
        term: Term::new(1).unwrap(),
        epoch: Epoch::from_bits(4).unwrap(),
        id,
    }
}

/// Keys of a node, with capabilities of masters for objects of all groups.
struct Harness(CapabilityKeys);

impl Harness {
    fn new() -> Harness {
        Harness(CapabilityKeys::new(GROUPS, CapabilityKey::new([0xee; 32])))
    }

    fn hold(&self, (term, secret): &(Term, CapabilitySecret), rotation: u64, groups: &[u16]) {
        let mut set = GroupSet::none(GROUPS);
        groups.iter().for_each(|&group| set.insert(GroupId(group)));
        self.0.hold(*term, &secret.key_of(NODE, rotation), &set);
    }

    /// In which groups the node accepts what a master signs with the key of this rotation number.
    fn accepts(&self, (_, secret): &(Term, CapabilitySecret), rotation: u64) -> Vec<u16> {
        let key = secret.key_of(NODE, rotation);
        let accepted = |&group: &u16| {
            let scope =
                scope((0..).map(|n| ObjectId([n; 16])).find(|id| id.group(GROUPS).0 == group).unwrap());
            self.0.verify(&scope, key.sign(&scope))
        };
        (0..GROUPS.get()).filter(accepted).collect()
    }
}

#[test]
fn node_accepts_the_current_and_the_previous_key_of_a_master() {
    let (keys, master) = (Harness::new(), master(1));
    assert!(keys.accepts(&master, 1).is_empty(), "without a session nothing is accepted");
    keys.hold(&master, 1, &[0, 1, 2, 3]);
    keys.hold(&master, 2, &[0, 1, 2, 3]);
    assert_eq!([1, 2, 3].map(|rotation| keys.accepts(&master, rotation).len()), [4, 4, 0]);
    keys.hold(&master, 3, &[0, 1, 2, 3]);
    assert_eq!([1, 2, 3].map(|rotation| keys.accepts(&master, rotation).len()), [0, 4, 4], "1 is retired");
    // The node was away for some rotations.
    keys.hold(&master, 9, &[0, 1, 2, 3]);
    assert_eq!([2, 3, 9].map(|rotation| keys.accepts(&master, rotation).len()), [0, 4, 4]);
}

#[test]
fn key_that_the_node_has_drops_no_other() {
    let (keys, master) = (Harness::new(), master(1));
    for rotation in [1, 2, 2, 1, 2] {
        keys.hold(&master, rotation, &[0]);
    }
    assert_eq!([1, 2].map(|rotation| keys.accepts(&master, rotation)), [[0], [0]]);
}

#[test]
fn keys_belong_to_the_groups_of_their_master() {
    let (keys, one, other) = (Harness::new(), master(1), master(2));
    keys.hold(&one, 1, &[0, 2]);
    keys.hold(&other, 1, &[1, 3]);
    assert_eq!((keys.accepts(&one, 1), keys.accepts(&other, 1)), (vec![0, 2], vec![1, 3]));
    keys.hold(&one, 2, &[0, 2]);
    keys.hold(&one, 3, &[0, 2]);
    assert_eq!(keys.accepts(&other, 1), [1, 3], "rotations of another master drop nothing");
}

#[test]
fn takeover_keeps_what_was_accepted_until_the_next_key_of_the_new_master() {
    let (keys, old, new) = (Harness::new(), master(1), master(2));
    keys.hold(&old, 7, &[0]);
    keys.hold(&old, 8, &[0]);
    keys.hold(&new, 1, &[0]);
    let accepted = |of: &(Term, CapabilitySecret), rotation| !keys.accepts(of, rotation).is_empty();
    assert_eq!([accepted(&old, 7), accepted(&old, 8), accepted(&new, 1)], [true; 3]);
    keys.hold(&new, 2, &[0]);
    assert_eq!([accepted(&old, 7), accepted(&old, 8)], [false; 2]);
    assert_eq!([accepted(&new, 1), accepted(&new, 2)], [true; 2]);
    // However often the master changes, a group has no more than three keys.
    for number in 3..9 {
        keys.hold(&master(number), 1, &[0]);
    }
    let alive = (1..9).filter(|&number| accepted(&master(number), 1));
    assert_eq!(alive.collect::<Vec<_>>(), [6, 7, 8]);
}

#[test]
fn staged_handles_are_signed_with_the_own_key() {
    let (keys, master) = (Harness::new(), master(1));
    keys.hold(&master, 1, &[0, 1, 2, 3]);
    let scope = scope(ObjectId([1; 16]));
    let staged = keys.0.sign_staged(&scope);
    assert!(keys.0.verify_staged(&scope, staged) && !keys.0.verify(&scope, staged));
    assert!(!keys.0.verify_staged(&scope, master.1.key_of(NODE, 1).sign(&scope)));
    assert!(!keys.0.verify_staged(&CapabilityScope { slot: SlotId(9), ..scope }, staged));
}
