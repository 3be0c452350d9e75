//! [`Settings`]: simulated properties of the devices.

use std::ffi::c_int;

/// Properties of the driver and its devices. Read once.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) devices: c_int,
    pub(crate) has_vmm: bool,
    pub(crate) has_fd: bool,
    pub(crate) has_atomics: bool,
    /// Whether host memory can be registered as read-only for devices.
    pub(crate) has_readonly: bool,
    /// Whether the host cannot access the devices' memory, as on most machines.
    pub(crate) host_cannot_access: bool,
    /// Pairs that can access each other; `None`: all can.
    peers: Option<Vec<(c_int, c_int)>>,
    pub(crate) granularity: u64,
    pub(crate) memory: u64,
    /// Overrides the version of either vendor.
    pub(crate) version: Option<c_int>,
}

impl Settings {
    pub(crate) fn from_env() -> Settings {
        Settings::parse(&std::env::var("MOONTIDE_FAKE_DRIVER").unwrap_or_default())
    }

    /// # Panics
    /// If a word is unknown: a test with a misspelled one must not pass. The last of several words with the same name
    /// applies.
    pub(crate) fn parse(text: &str) -> Settings {
        let mut settings = Settings {
            devices: 1,
            has_vmm: true,
            has_fd: true,
            has_atomics: false,
            has_readonly: true,
            host_cannot_access: false,
            peers: None,
            granularity: 64 << 10,
            memory: 8 << 30,
            version: None,
        };
        for word in text.split(',').filter(|word| !word.is_empty()) {
            let (name, value) = word.split_once('=').expect("name=value");
            let number = || value.parse::<u64>().expect("a number");
            match name {
                "devices" => settings.devices = number() as c_int,
                "vmm" => settings.has_vmm = number() != 0,
                "fd" => settings.has_fd = number() != 0,
                "atomics" => settings.has_atomics = number() != 0,
                "readonly" => settings.has_readonly = number() != 0,
                "blind" => settings.host_cannot_access = number() != 0,
                "granularity" => settings.granularity = number(),
                "memory" => settings.memory = number(),
                "version" => settings.version = Some(number() as c_int),
                "peers" => settings.peers = Some(pairs(value)),
                _ => panic!("MOONTIDE_FAKE_DRIVER has no setting {name}"),
            }
        }
        settings
    }

    pub(crate) fn can_access(&self, device: c_int, peer: c_int) -> bool {
        let are_peers = |pairs: &Vec<_>| pairs.contains(&(device, peer)) || pairs.contains(&(peer, device));
        device == peer || self.peers.as_ref().is_none_or(are_peers)
    }
}

/// Parses `0-1+1-2`, or `none`.
fn pairs(text: &str) -> Vec<(c_int, c_int)> {
    let device = |word: &str| word.parse().expect("a device");
    let pair = |word: &str| word.split_once('-').map(|(a, b)| (device(a), device(b))).expect("a-b");
    if text == "none" { vec![] } else { text.split('+').map(pair).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_access_is_symmetric() {
        let settings = Settings::parse("devices=3,peers=0-1,vmm=0");
        assert!(!settings.has_vmm && settings.has_fd && settings.devices == 3);
        assert!(settings.can_access(0, 1) && settings.can_access(1, 0) && settings.can_access(2, 2));
        assert!(!settings.can_access(0, 2));
        assert!(Settings::parse("").can_access(0, 2));
        assert!(!Settings::parse("peers=none").can_access(0, 1));
    }
}
