//! [`GroupRoutes`]: master of each group.

use std::num::NonZeroU16;

use moontide_types::{ErrorCode, ObjectId};

/// Master of each group, as index into the group map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupRoutes {
    /// Indexed by group.
    hosts: Vec<Option<u16>>,
}

impl GroupRoutes {
    /// Creates the routes of `groups` groups. `hosted` lists the groups of each master; unknown groups are ignored.
    pub fn new<'a>(groups: NonZeroU16, hosted: impl IntoIterator<Item = &'a [u32]>) -> GroupRoutes {
        let mut hosts = vec![None; groups.get().into()];
        for (master, groups) in (0u16..).zip(hosted) {
            for &group in groups {
                if let Some(host) = hosts.get_mut(group as usize) {
                    *host = Some(master);
                }
            }
        }
        GroupRoutes { hosts }
    }

    /// Returns the master that hosts an object's group, if any.
    pub fn host(&self, id: ObjectId) -> Option<u16> {
        let groups = NonZeroU16::new(self.hosts.len() as u16).expect("created with a non-zero count");
        self.hosts[usize::from(id.group(groups).0)]
    }

    /// Returns the groups of a master.
    pub fn groups_of(&self, master: u16) -> impl Iterator<Item = u16> {
        (0u16..).zip(&self.hosts).filter_map(move |(group, &host)| (host == Some(master)).then_some(group))
    }

    /// Returns the number of groups of the cluster.
    pub fn group_count(&self) -> u32 {
        self.hosts.len() as u32
    }

    /// Returns whether every group has a master.
    pub fn is_complete(&self) -> bool {
        self.hosts.iter().all(Option::is_some)
    }

    /// Groups the indices of a batch by master; those without a master come last.
    pub fn split(&self, batch: impl Iterator<Item = (usize, ObjectId)>) -> Vec<(Option<u16>, Vec<usize>)> {
        let mut parts: Vec<(Option<u16>, Vec<usize>)> = Vec::new();
        for (index, id) in batch {
            let host = self.host(id);
            match parts.iter_mut().find(|(of, _)| *of == host) {
                Some((_, part)) => part.push(index),
                None => parts.push((host, vec![index])),
            }
        }
        parts.sort_by_key(|(host, _)| host.map_or(u32::MAX, u32::from));
        parts
    }
}

/// Returns whether another master may have become responsible: a master that does not respond may have been replaced.
pub fn is_misrouted(code: ErrorCode) -> bool {
    use ErrorCode::*;
    matches!(code, WrongMaster | Unreachable | ConnectionLost | DeadlineExceeded)
}

/// Whether a key has no result after one round of calls: its master is unknown or silent, or is handing its group off.
pub fn is_unanswered(code: ErrorCode) -> bool {
    is_misrouted(code) || code == ErrorCode::Retry
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(group: u8) -> ObjectId {
        let mut id = [0; 16];
        id[0] = group;
        ObjectId(id)
    }

    #[test]
    fn batch_is_split_by_master_and_keeps_key_order() {
        let groups = NonZeroU16::new(4).unwrap();
        let routes = GroupRoutes::new(groups, [&[0, 2][..], &[1, 9][..]]);
        assert!(!routes.is_complete());
        let of = |g: u8| (0..=255).map(id).find(|id| id.group(groups).0 == u16::from(g)).unwrap();
        let batch = [of(1), of(0), of(3), of(2), of(1)];
        let parts = routes.split(batch.into_iter().enumerate());
        assert_eq!(parts, [(Some(0), vec![1, 3]), (Some(1), vec![0, 4]), (None, vec![2])]);
        assert!(GroupRoutes::new(groups, [&[0, 1, 2, 3][..]]).is_complete());
    }
}
