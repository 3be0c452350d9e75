//! [`Extra`]: what only some objects have: more than one place, stripes, an expiry, a cohort, a parent.
//!
//! Kept apart, so that the common object (one replica, one stripe, no attributes) pays four bytes for it.

use moontide_types::UnixMillis;

use crate::record::{NONE, Place};

/// The uncommon parts of an object.
#[derive(Clone, Debug)]
pub(crate) struct Extra {
    /// Stripes of each replica.
    pub(crate) stripes: u16,
    /// Length of every stripe but the last one.
    pub(crate) stripe_len: u64,
    /// All places but the first, which stands in the record; replica by replica, stripe by stripe.
    pub(crate) places: Vec<Place>,
    /// Which of all places a node has reported as READY; the first one is the record's own.
    pub(crate) committed: Vec<bool>,
    /// One per stripe if there are several, 0 while unknown.
    pub(crate) stripe_roots: Vec<u64>,
    /// When the object expires.
    pub(crate) expires: Option<UnixMillis>,
    /// Its cohort's number, or [`NONE`].
    pub(crate) cohort: u32,
    /// The block before this one.
    pub(crate) parent: Option<Box<[u8]>>,
}

impl Extra {
    /// One replica of one stripe without attributes.
    pub(crate) fn plain(object_len: u64) -> Extra {
        Extra {
            stripes: 1,
            stripe_len: object_len,
            places: vec![],
            committed: vec![],
            stripe_roots: vec![],
            expires: None,
            cohort: NONE,
            parent: None,
        }
    }
}

/// All extras of a group. Numbers stay valid until given back.
#[derive(Debug, Default)]
pub(crate) struct Extras {
    all: Vec<Option<Box<Extra>>>,
    vacant: Vec<u32>,
}

impl Extras {
    pub(crate) fn add(&mut self, extra: Extra) -> u32 {
        let extra = Some(Box::new(extra));
        match self.vacant.pop() {
            Some(at) => {
                self.all[at as usize] = extra;
                at
            }
            None => {
                self.all.push(extra);
                (self.all.len() - 1) as u32
            }
        }
    }

    pub(crate) fn get(&self, at: u32) -> Option<&Extra> {
        if at == NONE { None } else { self.all[at as usize].as_deref() }
    }

    pub(crate) fn get_mut(&mut self, at: u32) -> Option<&mut Extra> {
        if at == NONE { None } else { self.all[at as usize].as_deref_mut() }
    }

    pub(crate) fn remove(&mut self, at: u32) -> Option<Box<Extra>> {
        if at == NONE {
            return None;
        }
        let extra = self.all[at as usize].take();
        self.vacant.push(at);
        if self.vacant.len() == self.all.len() {
            *self = Extras::default();
        }
        extra
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len() - self.vacant.len()
    }
}
