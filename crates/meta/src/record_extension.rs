//! [`RecordExtension`]: uncommon properties of an object: more than one location, stripes, several replicas wanted, a
//! spread, copies on disks, an expiry, a cohort, a parent.
//!
//! Separate from the record, so that it costs the common object (one replica, one stripe, no attributes) four bytes.

use moontide_types::{Spread, UnixMillis};

use crate::ids::NONE;
use crate::record::SlotLocation;

/// Uncommon properties of an object.
#[derive(Clone, Debug)]
pub(crate) struct RecordExtension {
    /// Stripes of each replica.
    pub(crate) stripes: u16,
    /// Length of every stripe but the last one, in bytes.
    pub(crate) stripe_len: u64,
    /// All locations but the first, which is in the record; replica by replica, stripe by stripe.
    pub(crate) locations: Vec<SlotLocation>,
    /// Which locations a node has reported as READY; the first entry is for the record's own location.
    pub(crate) committed: Vec<bool>,
    /// Root digest of each stripe if there are several, 0 while unknown.
    pub(crate) stripe_roots: Vec<u64>,
    /// Complete, but some stripes are with nodes that are away: readers do not find the object.
    pub(crate) lacks_stripes: bool,
    /// In the list of objects with missing stripes.
    pub(crate) is_awaited: bool,
    pub(crate) expires: Option<UnixMillis>,
    /// Number of the cohort, or [`NONE`].
    pub(crate) cohort: u32,
    /// Hash of the preceding block.
    pub(crate) parent: Option<Box<[u8]>>,
    /// Replicas that the writer asked for, besides the first.
    pub(crate) extra_replicas: u8,
    /// What the replicas must not share, besides their node.
    pub(crate) spread: Option<Spread>,
    /// Disks that shall have the object, besides memory.
    pub(crate) disk_replicas: u8,
}

impl RecordExtension {
    /// Creates an extension for one replica of one stripe without attributes.
    pub(crate) fn plain(object_len: u64) -> RecordExtension {
        RecordExtension {
            stripes: 1,
            stripe_len: object_len,
            locations: vec![],
            committed: vec![],
            stripe_roots: vec![],
            lacks_stripes: false,
            is_awaited: false,
            expires: None,
            cohort: NONE,
            parent: None,
            extra_replicas: 0,
            spread: None,
            disk_replicas: 0,
        }
    }
}

/// All extensions of a group. A number stays valid until `remove`.
#[derive(Debug, Default)]
pub(crate) struct RecordExtensions {
    all: Vec<Option<Box<RecordExtension>>>,
    vacant: Vec<u32>,
}

impl RecordExtensions {
    pub(crate) fn add(&mut self, extension: RecordExtension) -> u32 {
        let extension = Some(Box::new(extension));
        match self.vacant.pop() {
            Some(at) => {
                self.all[at as usize] = extension;
                at
            }
            None => {
                self.all.push(extension);
                (self.all.len() - 1) as u32
            }
        }
    }

    pub(crate) fn get(&self, at: u32) -> Option<&RecordExtension> {
        if at == NONE { None } else { self.all[at as usize].as_deref() }
    }

    pub(crate) fn get_mut(&mut self, at: u32) -> Option<&mut RecordExtension> {
        if at == NONE { None } else { self.all[at as usize].as_deref_mut() }
    }

    pub(crate) fn remove(&mut self, at: u32) -> Option<Box<RecordExtension>> {
        if at == NONE {
            return None;
        }
        let extension = self.all[at as usize].take();
        self.vacant.push(at);
        if self.vacant.len() == self.all.len() {
            *self = RecordExtensions::default();
        }
        extension
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn len(&self) -> usize {
        self.all.len() - self.vacant.len()
    }
}
