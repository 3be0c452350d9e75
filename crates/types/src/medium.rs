//! [`Medium`]: what a segment's bytes are stored in.

use std::fmt;

/// Storage medium of a segment and of the records in it. The numbers are those of the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Medium {
    /// Memory of a node.
    #[default]
    Memory = 1,
    /// Memory of a GPU.
    Device = 2,
    /// Disk of a node. The node alone chooses the positions of its records.
    Disk = 3,
}

impl Medium {
    /// All media, in ascending order.
    pub const ALL: &[Medium] = &[Medium::Memory, Medium::Device, Medium::Disk];

    /// Returns the medium with this number.
    pub const fn from_number(number: u8) -> Option<Medium> {
        match number {
            1 => Some(Medium::Memory),
            2 => Some(Medium::Device),
            3 => Some(Medium::Disk),
            _ => None,
        }
    }

    /// Returns the number on the wire.
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// Returns the name in JSON, Python and the output of commands.
    pub const fn name(self) -> &'static str {
        match self {
            Medium::Memory => "memory",
            Medium::Device => "device",
            Medium::Disk => "disk",
        }
    }
}

impl fmt::Display for Medium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_round_trip() {
        for number in 0..=u8::MAX {
            let medium = Medium::from_number(number);
            assert_eq!(medium.map(Medium::number), (1..=3).contains(&number).then_some(number));
        }
        assert!(Medium::ALL.is_sorted() && Medium::ALL.len() == 3);
        assert_eq!(format!("{:>7}", Medium::Disk), "   disk");
    }
}
