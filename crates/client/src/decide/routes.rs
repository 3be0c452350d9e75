//! [`Routes`]: which master is asked about which object.

use std::num::NonZeroU16;

use moontide_types::{ErrorCode, ObjectId};

/// Which master hosts which group, by their positions in a map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routes {
    /// Of each group.
    hosts: Vec<Option<u16>>,
}

impl Routes {
    /// `hosted`: of each master the groups that it hosts. What the cluster does not have is left out.
    pub fn new<'a>(groups: NonZeroU16, hosted: impl IntoIterator<Item = &'a [u32]>) -> Routes {
        let mut hosts = vec![None; groups.get().into()];
        for (master, groups) in (0u16..).zip(hosted) {
            for &group in groups {
                if let Some(host) = hosts.get_mut(group as usize) {
                    *host = Some(master);
                }
            }
        }
        Routes { hosts }
    }

    /// The master that hosts an object's group, if one does.
    pub fn host(&self, id: ObjectId) -> Option<u16> {
        let groups = NonZeroU16::new(self.hosts.len() as u16).expect("made of as many groups");
        self.hosts[usize::from(id.group(groups).0)]
    }

    /// The groups that a master hosts.
    pub fn groups_of(&self, master: u16) -> impl Iterator<Item = u16> {
        (0u16..).zip(&self.hosts).filter_map(move |(group, &host)| (host == Some(master)).then_some(group))
    }

    /// Whether every group has a master.
    pub fn is_complete(&self) -> bool {
        self.hosts.iter().all(Option::is_some)
    }

    /// Sorts positions of a batch by the master that is asked about them; those without one come last.
    pub fn split(&self, batch: impl Iterator<Item = (usize, ObjectId)>) -> Vec<(Option<u16>, Vec<usize>)> {
        let mut parts: Vec<(Option<u16>, Vec<usize>)> = Vec::new();
        for (position, id) in batch {
            let host = self.host(id);
            match parts.iter_mut().find(|(of, _)| *of == host) {
                Some((_, part)) => part.push(position),
                None => parts.push((host, vec![position])),
            }
        }
        parts.sort_by_key(|(host, _)| host.map_or(u32::MAX, u32::from));
        parts
    }
}

/// Whether a failure of a call may be because another master should have been asked: one that says nothing may have been
/// replaced.
pub fn is_misrouted(code: ErrorCode) -> bool {
    use ErrorCode::*;
    matches!(code, WrongMaster | Unreachable | ConnectionLost | DeadlineExceeded)
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
    fn a_batch_is_split_by_master_and_keeps_its_order() {
        let groups = NonZeroU16::new(4).unwrap();
        let routes = Routes::new(groups, [&[0, 2][..], &[1, 9][..]]);
        assert!(!routes.is_complete());
        let of = |g: u8| (0..=255).map(id).find(|id| id.group(groups).0 == u16::from(g)).unwrap();
        let batch = [of(1), of(0), of(3), of(2), of(1)];
        let parts = routes.split(batch.into_iter().enumerate());
        assert_eq!(parts, [(Some(0), vec![1, 3]), (Some(1), vec![0, 4]), (None, vec![2])]);
        assert!(Routes::new(groups, [&[0, 1, 2, 3][..]]).is_complete());
    }
}
