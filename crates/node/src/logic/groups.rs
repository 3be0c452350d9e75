//! [`GroupSet`]: a subset of a cluster's groups. Also assigns segments to groups.

use std::collections::BTreeMap;
use std::num::NonZeroU16;

use moontide_types::{GroupId, NodeId, ObjectId, SegmentId, Term};

/// A subset of a cluster's groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GroupSet {
    groups: NonZeroU16,
    words: Vec<u64>,
}

impl GroupSet {
    /// Returns the empty subset of `groups` groups.
    pub(crate) fn none(groups: NonZeroU16) -> GroupSet {
        GroupSet { groups, words: vec![0; usize::from(groups.get()).div_ceil(64)] }
    }

    /// Returns the set of all groups.
    #[cfg(test)]
    pub(crate) fn all(groups: NonZeroU16) -> GroupSet {
        let mut all = GroupSet::none(groups);
        (0..groups.get()).for_each(|group| all.insert(GroupId(group)));
        all
    }

    /// Number of groups of the cluster.
    pub(crate) fn of(&self) -> NonZeroU16 {
        self.groups
    }

    /// Adds a group. Ignores a group that the cluster does not have.
    pub(crate) fn insert(&mut self, group: GroupId) {
        if group.0 < self.groups.get() {
            self.words[usize::from(group.0) / 64] |= 1 << (group.0 % 64);
        }
    }

    /// Whether the set contains a group.
    pub(crate) fn contains(&self, group: GroupId) -> bool {
        self.words.get(usize::from(group.0) / 64).is_some_and(|word| word >> (group.0 % 64) & 1 == 1)
    }

    /// Whether the set contains the group of an object.
    pub(crate) fn has_object(&self, id: ObjectId) -> bool {
        self.contains(id.group(self.groups))
    }

    /// Number of groups in the set.
    pub(crate) fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether the set is empty.
    pub(crate) fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    /// Returns the groups that are not in `other`.
    pub(crate) fn without(&self, other: &GroupSet) -> GroupSet {
        let mut left = self.clone();
        left.words.iter_mut().zip(&other.words).for_each(|(word, other)| *word &= !other);
        left
    }

    /// Adds all groups of `other`.
    pub(crate) fn extend(&mut self, other: &GroupSet) {
        self.words.iter_mut().zip(&other.words).for_each(|(word, other)| *word |= other);
    }
}

/// The groups that a master hosts, each with its term.
pub(crate) type HostedGroups = BTreeMap<GroupId, Term>;

/// Returns the set of the hosted groups, without their terms.
pub(crate) fn set_of(groups: NonZeroU16, hosted: &HostedGroups) -> GroupSet {
    let mut set = GroupSet::none(groups);
    hosted.keys().for_each(|&group| set.insert(group));
    set
}

/// Returns the groups that have to be mounted, and those that have to be unmounted before, for a master that hosts
/// `hosted` while `mounted` are mounted. A group with a newer term has no state of its earlier terms.
pub(crate) fn mount_diff(
    groups: NonZeroU16,
    hosted: &HostedGroups,
    mounted: &HostedGroups,
) -> (GroupSet, GroupSet) {
    let (mut missing, mut lost) = (GroupSet::none(groups), GroupSet::none(groups));
    for (&group, &term) in hosted {
        match mounted.get(&group) {
            // A newer term that the group map does not contain yet.
            Some(&mounted) if mounted >= term => {}
            mounted => {
                missing.insert(group);
                if mounted.is_some() {
                    lost.insert(group);
                }
            }
        }
    }
    mounted.keys().filter(|group| !hosted.contains_key(group)).for_each(|&group| lost.insert(group));
    (missing, lost)
}

/// Returns the group of a segment: round robin, starting with a different group on every node, so that surplus segments
/// of nodes with more segments than groups do not go to the same groups everywhere.
pub(crate) fn group_of_segment(node: NodeId, segment: SegmentId, groups: NonZeroU16) -> GroupId {
    let sum = (node.0 % u64::from(groups.get())) + u64::from(segment.0);
    GroupId((sum % u64::from(groups.get())) as u16) // < groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn group_set_ignores_unknown_groups_and_supports_set_operations() {
        let groups = NonZeroU16::new(70).unwrap();
        let mut some = GroupSet::none(groups);
        assert!(some.is_empty());
        [0, 63, 64, 69, 70, 4000].into_iter().for_each(|group| some.insert(GroupId(group)));
        assert_eq!(some.len(), 4, "groups that the cluster does not have are ignored");
        let all = GroupSet::all(groups);
        assert_eq!((all.len(), all.without(&some).len(), some.without(&all).len()), (70, 66, 0));
        let mut both = all.without(&some);
        both.extend(&some);
        assert_eq!(both, all);
        assert!(some.contains(GroupId(69)) && !some.contains(GroupId(1)) && !some.contains(GroupId(4000)));
        assert_eq!(some.has_object(ObjectId([0; 16])), some.contains(ObjectId([0; 16]).group(groups)));
    }

    #[test]
    fn mount_diff_remounts_groups_with_newer_term() {
        let groups = NonZeroU16::new(8).unwrap();
        let hosted = |pairs: &[(u16, u32)]| -> HostedGroups {
            pairs.iter().map(|&(group, term)| (GroupId(group), Term::new(term).unwrap())).collect()
        };
        let (hosted, mounted) =
            (hosted(&[(0, 5), (1, 6), (2, 7), (4, 3)]), hosted(&[(0, 5), (1, 4), (3, 9), (4, 8)]));
        let (missing, lost) = mount_diff(groups, &hosted, &mounted);
        let list = |set: &GroupSet| (0..8).filter(|&g| set.contains(GroupId(g))).collect::<Vec<_>>();
        assert_eq!((list(&missing), list(&lost)), (vec![1, 2], vec![1, 3]));
        let (missing, lost) = mount_diff(groups, &mounted, &mounted);
        assert!(missing.is_empty() && lost.is_empty());
    }

    #[test]
    fn node_with_enough_segments_covers_every_group() {
        let groups = NonZeroU16::new(16).unwrap();
        for node in [0, 1, 15, 16, u64::MAX] {
            let mut seen = GroupSet::none(groups);
            (0..16).for_each(|s| seen.insert(group_of_segment(NodeId(node), SegmentId(s), groups)));
            assert_eq!(seen, GroupSet::all(groups), "node {node}");
        }
    }
}
