//! File names of records.

use moontide_types::{Epoch, ObjectId};

use super::dirs::Directory;
use crate::backend::RecordId;

const RECORD: &str = ".rec";
const TEMPORARY: &str = ".rec.tmp";

/// Returns the path of a record's file.
pub(super) fn path_of(name: &RecordId) -> String {
    format!("{}/{}{RECORD}", Directory::of(name), stem(name))
}

/// Returns the path of a record's temporary file.
pub(super) fn temporary_of(name: &RecordId) -> String {
    format!("{}/{}{TEMPORARY}", Directory::of(name), stem(name))
}

fn stem(name: &RecordId) -> String {
    let id: String = name.id.0.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{id}-{:016x}-{}", name.version.bits(), name.stripe)
}

/// Kind of a file in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A record.
    Record(RecordId),
    /// An unfinished record.
    Temporary,
    /// A file of another program.
    Foreign,
}

/// Returns the kind of a file by its name.
pub(super) fn kind_of(directory: Directory, file: &str) -> Kind {
    if file.ends_with(TEMPORARY) {
        return Kind::Temporary;
    }
    let name = file.strip_suffix(RECORD).and_then(parse);
    // Only the exact name in the right directory.
    match name {
        Some(name) if Directory::of(&name) == directory && file == format!("{}{RECORD}", stem(&name)) => {
            Kind::Record(name)
        }
        _ => Kind::Foreign,
    }
}

fn parse(stem: &str) -> Option<RecordId> {
    let mut parts = stem.split('-');
    let (id, version, stripe) = (parts.next()?, parts.next()?, parts.next()?);
    if id.len() != 32 || !id.is_ascii() {
        return None;
    }
    let mut bytes = [0; 16];
    for (byte, at) in bytes.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(&id[at..at + 2], 16).ok()?;
    }
    let version = Epoch::from_bits(u64::from_str_radix(version, 16).ok()?).ok()?;
    Some(RecordId { id: ObjectId(bytes), version, stripe: stripe.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_name_round_trips_and_foreign_names_are_detected() {
        let version = Epoch::from_bits(0xabc).expect("small");
        let name = RecordId { id: ObjectId(*b"0123456789abcdef"), version, stripe: 77 };
        let directory = Directory::of(&name);
        let path = "30/31/30313233343536373839616263646566-0000000000000abc-77.rec";
        assert_eq!(path_of(&name), path);
        let file = &path[6..];
        assert_eq!(kind_of(directory, file), Kind::Record(name));
        assert_eq!(kind_of(directory, &format!("{file}.tmp")), Kind::Temporary);
        assert_eq!(temporary_of(&name), format!("{path}.tmp"));
        let elsewhere = Directory { first: 0x30, second: 0x32 };
        assert_eq!(kind_of(elsewhere, file), Kind::Foreign);
        let others = [
            "",
            ".rec",
            "a-b-c.rec",
            "30313233343536373839616263646566-0000000000000abc-77",
            "30313233343536373839616263646566-0000000000000abc-077.rec",
            "30313233343536373839616263646566-0000000000000ABC-77.rec",
            "30313233343536373839616263646566-abc-77.rec",
            "30313233343536373839616263646566-0000000000000abc-77-1.rec",
            "30313233343536373839616263646566-ffffffffffffffff-77.rec",
            "30313233343536373839616263646566-0000000000000abc-65536.rec",
            "+0313233343536373839616263646566-0000000000000abc-77.rec",
        ];
        for other in others {
            assert_eq!(kind_of(directory, other), Kind::Foreign, "{other}");
        }
    }
}
