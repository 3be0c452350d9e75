//! [`mark!`](crate::mark): names a place, or a coincidence, that a simulated world counts.

/// Tells a simulated world that this place was reached, or that a condition was true here. The world counts it, and may delay
/// the thread there. In an ordinary build it does nothing, and the condition is not evaluated.
///
/// ```
/// let (written, removed) = (true, true);
/// moontide_rt::mark!("write ends after the removal of its version", written && removed);
/// moontide_rt::mark!("removal answered");
/// ```
#[cfg(sim)]
#[macro_export]
macro_rules! mark {
    ($name:expr) => {
        $crate::sim::mark($name)
    };
    ($name:expr, $condition:expr) => {
        if $crate::sim::is_inside() && $condition {
            $crate::sim::mark($name)
        }
    };
}

/// Tells a simulated world that this place was reached, or that a condition was true here. The world counts it, and may delay
/// the thread there. In an ordinary build it does nothing, and the condition is not evaluated.
///
/// ```
/// let (written, removed) = (true, true);
/// moontide_rt::mark!("write ends after the removal of its version", written && removed);
/// moontide_rt::mark!("removal answered");
/// ```
#[cfg(not(sim))]
#[macro_export]
macro_rules! mark {
    ($name:expr) => {
        let _ = || -> &'static str { $name };
    };
    ($name:expr, $condition:expr) => {
        let _ = || -> (&'static str, bool) { ($name, $condition) };
    };
}
