//! [`GroupSet`]: some of a cluster's groups. And which group a segment is for.

use std::collections::BTreeMap;
use std::num::NonZeroU16;

use moontide_types::{GroupId, NodeId, ObjectId, SegmentId, Term};

/// Some of the groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupSet {
    groups: NonZeroU16,
    words: Vec<u64>,
}

impl GroupSet {
    /// None of so many.
    pub fn none(groups: NonZeroU16) -> GroupSet {
        GroupSet { groups, words: vec![0; usize::from(groups.get()).div_ceil(64)] }
    }

    /// All of them.
    pub fn all(groups: NonZeroU16) -> GroupSet {
        let mut all = GroupSet::none(groups);
        (0..groups.get()).for_each(|group| all.insert(GroupId(group)));
        all
    }

    /// How many the cluster has.
    pub fn of(&self) -> NonZeroU16 {
        self.groups
    }

    /// Adds one; what the cluster does not have is left out.
    pub fn insert(&mut self, group: GroupId) {
        if group.0 < self.groups.get() {
            self.words[usize::from(group.0) / 64] |= 1 << (group.0 % 64);
        }
    }

    /// Whether this one is in it.
    pub fn contains(&self, group: GroupId) -> bool {
        self.words.get(usize::from(group.0) / 64).is_some_and(|word| word >> (group.0 % 64) & 1 == 1)
    }

    /// Whether the group of an object is in it.
    pub fn has_object(&self, id: ObjectId) -> bool {
        self.contains(id.group(self.groups))
    }

    /// How many are in it.
    pub fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    /// Those that are not in the other.
    pub fn without(&self, other: &GroupSet) -> GroupSet {
        let mut left = self.clone();
        left.words.iter_mut().zip(&other.words).for_each(|(word, other)| *word &= !other);
        left
    }

    /// Adds all of the other.
    pub fn extend(&mut self, other: &GroupSet) {
        self.words.iter_mut().zip(&other.words).for_each(|(word, other)| *word |= other);
    }
}

/// The groups that a master hosts, each with its term.
pub type Hosted = BTreeMap<GroupId, Term>;

/// Without the terms.
pub fn set_of(groups: NonZeroU16, hosted: &Hosted) -> GroupSet {
    let mut set = GroupSet::none(groups);
    hosted.keys().for_each(|&group| set.insert(group));
    set
}

/// What has to be mounted, and what has to be forgotten first, for a master that hosts `wanted` and knows what was mounted
/// in these terms. A group in another term is one that knows nothing of before.
pub fn behind(groups: NonZeroU16, wanted: &Hosted, mounted: &Hosted) -> (GroupSet, GroupSet) {
    let (mut missing, mut lost) = (GroupSet::none(groups), GroupSet::none(groups));
    for (&group, &term) in wanted {
        match mounted.get(&group) {
            // One that it has not told the others of yet is newer.
            Some(&known) if known >= term => {}
            known => {
                missing.insert(group);
                if known.is_some() {
                    lost.insert(group);
                }
            }
        }
    }
    mounted.keys().filter(|group| !wanted.contains_key(group)).for_each(|&group| lost.insert(group));
    (missing, lost)
}

/// Which group a segment is for: each in turn, and every node begins with another one, so that what is left over when a
/// node has more segments than there are groups does not go to the same groups everywhere.
pub fn group_of_segment(node: NodeId, segment: SegmentId, groups: NonZeroU16) -> GroupId {
    let sum = (node.0 % u64::from(groups.get())) + u64::from(segment.0);
    GroupId((sum % u64::from(groups.get())) as u16) // < groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_sets() {
        let groups = NonZeroU16::new(70).unwrap();
        let mut some = GroupSet::none(groups);
        assert!(some.is_empty());
        [0, 63, 64, 69, 70, 4000].into_iter().for_each(|group| some.insert(GroupId(group)));
        assert_eq!(some.len(), 4, "what the cluster does not have is left out");
        let all = GroupSet::all(groups);
        assert_eq!((all.len(), all.without(&some).len(), some.without(&all).len()), (70, 66, 0));
        let mut both = all.without(&some);
        both.extend(&some);
        assert_eq!(both, all);
        assert!(some.contains(GroupId(69)) && !some.contains(GroupId(1)) && !some.contains(GroupId(4000)));
        assert_eq!(some.has_object(ObjectId([0; 16])), some.contains(ObjectId([0; 16]).group(groups)));
    }

    #[test]
    fn a_group_in_another_term_is_mounted_again() {
        let groups = NonZeroU16::new(8).unwrap();
        let hosted = |pairs: &[(u16, u32)]| -> Hosted {
            pairs.iter().map(|&(group, term)| (GroupId(group), Term::new(term).unwrap())).collect()
        };
        let (wanted, mounted) =
            (hosted(&[(0, 5), (1, 6), (2, 7), (4, 3)]), hosted(&[(0, 5), (1, 4), (3, 9), (4, 8)]));
        let (missing, lost) = behind(groups, &wanted, &mounted);
        let list = |set: &GroupSet| (0..8).filter(|&g| set.contains(GroupId(g))).collect::<Vec<_>>();
        assert_eq!((list(&missing), list(&lost)), (vec![1, 2], vec![1, 3]));
        let (missing, lost) = behind(groups, &mounted, &mounted);
        assert!(missing.is_empty() && lost.is_empty());
    }

    #[test]
    fn every_group_gets_a_segment_of_a_node_with_enough_of_them() {
        let groups = NonZeroU16::new(16).unwrap();
        for node in [0, 1, 15, 16, u64::MAX] {
            let mut seen = GroupSet::none(groups);
            (0..16).for_each(|s| seen.insert(group_of_segment(NodeId(node), SegmentId(s), groups)));
            assert_eq!(seen, GroupSet::all(groups), "node {node}");
        }
    }
}
