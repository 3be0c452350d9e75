//! Mutations: deliberate bugs that tests enable to prove that they detect them.
//!
//! The code asks [`mutation_enabled`] at the place of the bug. A mutation is named by a string, or by a variant of an
//! enum that [`mutations!`](crate::mutations) declares. At most one is enabled at a time, in one of three scopes:
//!
//! - one thread, by [`with_mutation`]: both model checkers run all threads of a model on one OS thread;
//! - one object that is used by several threads, by a [`MutationSwitch`] in it;
//! - the whole process, by the environment variable `MOONTIDE_MUTATION` in a build with `--cfg mutation`, which
//!   `cargo xtask mutants` makes.
//!
//! In a release build without `--cfg loom`, `--cfg shuttle` or `--cfg mutation`, [`mutation_enabled`] is the constant
//! `false`, a [`MutationSwitch`] has no bytes, and the compiler removes the branches.

use crate::sync::Ordering;

#[cfg(not(any(debug_assertions, loom, shuttle, mutation)))]
pub use off::{MutationSwitch, mutation_enabled, with_mutation};
#[cfg(any(debug_assertions, loom, shuttle, mutation))]
pub use on::{MutationSwitch, mutation_enabled, with_mutation};

/// Name of a mutation.
pub trait Mutation: Copy {
    /// Unique name in the process.
    fn name(self) -> &'static str;
}

impl Mutation for &'static str {
    #[inline(always)]
    fn name(self) -> &'static str {
        self
    }
}

/// Declares an enum of mutations. Each variant is documented by the bug that it enables.
///
/// ```
/// moontide_rt::mutations! {
///     /// A deliberate bug in this module.
///     enum Mutation {
///         /// The lock is never released.
///         LockKept,
///     }
/// }
///
/// assert!(!moontide_rt::mutation_enabled(Mutation::LockKept));
/// ```
#[macro_export]
macro_rules! mutations {
    (
        $(#[$attribute:meta])*
        $visibility:vis enum $name:ident { $($(#[$variant_attribute:meta])* $variant:ident,)+ }
    ) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $visibility enum $name { $($(#[$variant_attribute])* $variant,)+ }

        impl $crate::Mutation for $name {
            fn name(self) -> &'static str {
                match self { $(Self::$variant => concat!(module_path!(), "::", stringify!($variant)),)+ }
            }
        }
    };
}

/// Returns `order`, or Relaxed if the mutation is enabled.
#[inline(always)]
pub fn weakened(mutation: impl Mutation, order: Ordering) -> Ordering {
    if mutation_enabled(mutation) { Ordering::Relaxed } else { order }
}

#[cfg(not(any(debug_assertions, loom, shuttle, mutation)))]
mod off {
    use super::Mutation;

    /// Returns `false`: no mutation can be enabled in this build.
    #[inline(always)]
    pub fn mutation_enabled(_mutation: impl Mutation) -> bool {
        false
    }

    /// Runs `test`.
    ///
    /// # Panics
    ///
    /// With a mutation: none can be enabled in this build.
    pub fn with_mutation<M: Mutation, T>(mutation: Option<M>, test: impl FnOnce() -> T) -> T {
        MutationSwitch.enable(mutation);
        test()
    }

    /// A mutation enabled for one object: none in this build.
    #[derive(Debug, Default)]
    pub struct MutationSwitch;

    impl MutationSwitch {
        /// Returns `false`: no mutation can be enabled in this build.
        #[inline(always)]
        pub fn is_enabled(&self, _mutation: impl Mutation) -> bool {
            false
        }

        /// Does nothing.
        ///
        /// # Panics
        ///
        /// With a mutation: none can be enabled in this build.
        pub fn enable<M: Mutation>(&self, mutation: Option<M>) {
            assert!(mutation.is_none(), "no mutation can be enabled in this build");
        }
    }
}

#[cfg(any(debug_assertions, loom, shuttle, mutation))]
mod on {
    use std::cell::Cell;
    use std::sync::Mutex;

    use super::Mutation;

    thread_local!(static ENABLED: Cell<Option<&'static str>> = const { Cell::new(None) });

    /// Returns whether the mutation is enabled for this thread or for the process.
    #[inline]
    pub fn mutation_enabled(mutation: impl Mutation) -> bool {
        ENABLED.get().is_some_and(|enabled| enabled == mutation.name()) || enabled_in_process(mutation)
    }

    #[cfg(not(mutation))]
    #[inline(always)]
    fn enabled_in_process(_mutation: impl Mutation) -> bool {
        false
    }

    /// Reads the environment once per process.
    #[cfg(mutation)]
    fn enabled_in_process(mutation: impl Mutation) -> bool {
        static ENABLED: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
        ENABLED.get_or_init(|| std::env::var("MOONTIDE_MUTATION").ok()).as_deref() == Some(mutation.name())
    }

    /// Runs `test` with a mutation enabled for this thread, or without any for `None`. Afterwards, also after a panic,
    /// the thread is as before.
    pub fn with_mutation<M: Mutation, T>(mutation: Option<M>, test: impl FnOnce() -> T) -> T {
        struct Restore(Option<&'static str>);
        impl Drop for Restore {
            fn drop(&mut self) {
                ENABLED.set(self.0);
            }
        }
        let _restore = Restore(ENABLED.replace(mutation.map(M::name)));
        test()
    }

    /// A mutation enabled for one object, on whatever thread it is used.
    #[derive(Debug, Default)]
    pub struct MutationSwitch(Mutex<Option<&'static str>>);

    impl MutationSwitch {
        /// Returns whether the mutation is enabled for this object, for this thread or for the process.
        pub fn is_enabled(&self, mutation: impl Mutation) -> bool {
            self.0.lock().is_ok_and(|enabled| *enabled == Some(mutation.name())) || mutation_enabled(mutation)
        }

        /// Enables a mutation, or none.
        pub fn enable<M: Mutation>(&self, mutation: Option<M>) {
            *self.0.lock().expect("no holder panics") = mutation.map(M::name);
        }
    }
}

#[cfg(all(test, debug_assertions, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    mod other {
        crate::mutations! {
            /// Has the variant of the other enum.
            pub(super) enum Mutation {
                /// Same name, another module.
                Late,
            }
        }
    }

    crate::mutations! {
        /// Of these tests.
        enum Bug {
            /// Too late.
            Late,
            /// Too early.
            Early,
        }
    }

    #[test]
    fn mutation_is_enabled_by_name_for_its_thread_only() {
        assert!(!mutation_enabled(Bug::Late));
        with_mutation(Some(Bug::Late), || {
            assert!(mutation_enabled(Bug::Late));
            assert!(mutation_enabled("moontide_rt::mutation::tests::Late"));
            assert!(!mutation_enabled(Bug::Early));
            assert!(!mutation_enabled(other::Mutation::Late));
            assert!(!std::thread::spawn(|| mutation_enabled(Bug::Late)).join().unwrap());
        });
        assert!(!mutation_enabled(Bug::Late));
    }

    #[test]
    fn thread_is_as_before_after_nested_scope_and_panic() {
        with_mutation(Some(Bug::Late), || {
            with_mutation(None::<Bug>, || assert!(!mutation_enabled(Bug::Late)));
            let panicked =
                std::panic::catch_unwind(|| with_mutation(Some(Bug::Early), || panic!("as intended")));
            assert!(panicked.is_err());
            assert!(mutation_enabled(Bug::Late) && !mutation_enabled(Bug::Early));
        });
    }

    #[test]
    fn switch_enables_mutation_for_one_object_on_all_threads() {
        let (switch, other) = (MutationSwitch::default(), MutationSwitch::default());
        switch.enable(Some(Bug::Early));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert!(switch.is_enabled(Bug::Early) && !switch.is_enabled(Bug::Late));
                assert!(!other.is_enabled(Bug::Early) && !mutation_enabled(Bug::Early));
            });
        });
        switch.enable(None::<Bug>);
        assert!(!switch.is_enabled(Bug::Early));
    }

    #[test]
    fn mutation_weakens_ordering() {
        assert_eq!(weakened(Bug::Late, Ordering::Release), Ordering::Release);
        with_mutation(Some(Bug::Late), || {
            assert_eq!(weakened(Bug::Late, Ordering::Release), Ordering::Relaxed);
        });
    }
}
