//! Bugs that can be planted, to show that our tests would find them.
//!
//! In an ordinary build [`planted`] is the constant `false` and the branches vanish. In a build with `--cfg planted` the
//! environment names one bug for the whole process. `cargo xtask mutants` lists the bugs, and runs the tests that must find
//! them.

/// Whether this bug is planted.
#[cfg(not(planted))]
#[inline(always)]
pub const fn planted(_bug: &str) -> bool {
    false
}

/// Whether this bug is planted: the environment is looked at once.
#[cfg(planted)]
pub fn planted(bug: &str) -> bool {
    static PLANTED: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    PLANTED.get_or_init(|| std::env::var("MOONTIDE_PLANTED").ok()).as_deref() == Some(bug)
}
