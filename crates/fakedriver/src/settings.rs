//! What kind of devices this driver claims to have.

use std::ffi::c_int;

/// Read once.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) devices: c_int,
    pub(crate) has_vmm: bool,
    pub(crate) has_fd: bool,
    pub(crate) has_atomics: bool,
    /// Whether memory of the host can be registered as one that devices only read.
    pub(crate) has_readonly: bool,
    /// Whether processors cannot touch the devices' memory, as those of most machines cannot.
    pub(crate) is_blind: bool,
    /// Pairs that can access each other; none: all can.
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
    /// If a word has no meaning: a test that misspells one must not pass. Of two with the same name the last counts.
    pub(crate) fn parse(text: &str) -> Settings {
        let mut settings = Settings {
            devices: 1,
            has_vmm: true,
            has_fd: true,
            has_atomics: false,
            has_readonly: true,
            is_blind: false,
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
                "blind" => settings.is_blind = number() != 0,
                "granularity" => settings.granularity = number(),
                "memory" => settings.memory = number(),
                "version" => settings.version = Some(number() as c_int),
                "peers" => settings.peers = Some(pairs(value)),
                _ => panic!("MOONTIDE_FAKE_DRIVER has no {name}"),
            }
        }
        settings
    }

    pub(crate) fn can_access(&self, device: c_int, peer: c_int) -> bool {
        let are_peers = |pairs: &Vec<_>| pairs.contains(&(device, peer)) || pairs.contains(&(peer, device));
        device == peer || self.peers.as_ref().is_none_or(are_peers)
    }
}

/// `0-1+1-2`, or `none`.
fn pairs(text: &str) -> Vec<(c_int, c_int)> {
    let device = |word: &str| word.parse().expect("a device");
    let pair = |word: &str| word.split_once('-').map(|(a, b)| (device(a), device(b))).expect("a-b");
    if text == "none" { vec![] } else { text.split('+').map(pair).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_pairs_in_both_directions() {
        let settings = Settings::parse("devices=3,peers=0-1,vmm=0");
        assert!(!settings.has_vmm && settings.has_fd && settings.devices == 3);
        assert!(settings.can_access(0, 1) && settings.can_access(1, 0) && settings.can_access(2, 2));
        assert!(!settings.can_access(0, 2));
        assert!(Settings::parse("").can_access(0, 2));
        assert!(!Settings::parse("peers=none").can_access(0, 1));
    }
}
