//! What the operating system takes back when a process ends, however it ends.

/// Something that belongs to the process of the running thread, outside its heap: a mapping, a descriptor. If a simulated
/// world kills the process, no destructor runs, and the world takes it back instead. In an ordinary build it is nothing: the
/// kernel does that.
#[derive(Debug)]
#[must_use]
pub struct Owned {
    #[cfg(sim)]
    _owned: Option<crate::sim::OwnedBy>,
}

impl Owned {
    /// Registers how to take something back from a process that was killed. If the value is dropped, it is no more to be
    /// taken back.
    #[inline]
    #[cfg_attr(
        not(sim),
        expect(unused_variables, reason = "only worlds kill processes whose memory is theirs")
    )]
    pub fn new(take_back: impl FnOnce() + 'static) -> Owned {
        Owned {
            #[cfg(sim)]
            _owned: crate::sim::OwnedBy::running_process(Box::new(take_back)),
        }
    }
}
