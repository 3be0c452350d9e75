//! What a program or a shared library asks of the system that loads it, read from its ELF headers.
//!
//! Owns [`ElfRequirements`]. Reads 64-bit little-endian files only, which is what we ship, and no more of them than the loader
//! reads: the dynamic section, the versions of symbols it refers to, and the flags of the stack.
//!
//! Invariant: a damaged file is an error, never a panic: every offset is checked before it is used.

use std::fmt;

const MAGIC: [u8; 6] = [0x7f, b'E', b'L', b'F', /* 64 bits */ 2, /* little-endian */ 1];

/// Kinds of program headers.
const LOAD: u32 = 1;
const DYNAMIC: u32 = 2;
const GNU_STACK: u32 = 0x6474_e551;
/// A program header's flag: may be executed.
const EXECUTABLE: u32 = 1;
/// A kind of section: the symbols that only debuggers want.
const SYMBOLS: u32 = 2;

/// Tags of entries in the dynamic section.
const END: u64 = 0;
const NEEDED: u64 = 1;
const STRINGS: u64 = 5;
const VERSIONS: u64 = 0x6fff_fffe;
const VERSIONS_COUNT: u64 = 0x6fff_ffff;

/// What one file needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ElfRequirements {
    /// Names of shared libraries, in the file's order.
    pub(crate) libraries: Vec<String>,
    /// Versions of symbols, such as `GLIBC_2.28`.
    pub(crate) versions: Vec<String>,
    pub(crate) executable_stack: bool,
    /// Whether it still has symbols that strip would take away.
    pub(crate) symbols: bool,
}

/// A version of glibc.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Glibc(pub(crate) u32, pub(crate) u32);

/// Not a file that we can read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ElfError {
    #[error("not a 64-bit little-endian ELF file")]
    Magic,
    #[error("the file ends before byte {0}, which its headers name")]
    Short(u64),
    #[error("no segment of the file holds address {0:#x}, which its headers name")]
    Address(u64),
}

impl ElfRequirements {
    pub(crate) fn of(file: &[u8]) -> Result<Self, ElfError> {
        if !file.starts_with(&MAGIC) {
            return Err(ElfError::Magic);
        }
        let file = File(file);
        let segments = file.segments()?;
        let dynamic = file.dynamic(&segments)?;
        let value = |tag| dynamic.iter().find(|(found, _)| *found == tag).map(|(_, value)| *value);
        let strings = value(STRINGS).map(|address| offset(&segments, address)).transpose()?;

        let mut libraries = Vec::new();
        let mut versions = Vec::new();
        if let Some(strings) = strings {
            for (_, name) in dynamic.iter().filter(|(tag, _)| *tag == NEEDED) {
                libraries.push(file.text(strings.saturating_add(*name))?);
            }
            if let Some(address) = value(VERSIONS) {
                let count = value(VERSIONS_COUNT).unwrap_or(0);
                versions = file.versions(offset(&segments, address)?, count, strings)?;
            }
        }
        let stack = segments.iter().find(|segment| segment.kind == GNU_STACK);
        Ok(Self {
            libraries,
            versions,
            // Without the header the kernel gives an executable one.
            executable_stack: stack.is_none_or(|segment| segment.flags & EXECUTABLE != 0),
            symbols: file.has_symbols()?,
        })
    }

    /// The oldest glibc that has everything; `None` if nothing of it is needed.
    pub(crate) fn glibc(&self) -> Option<Glibc> {
        self.versions.iter().filter_map(|version| Glibc::named(version)).max()
    }
}

impl Glibc {
    /// `GLIBC_2.2.5` is 2.2: the third number stopped long before what matters here.
    fn named(version: &str) -> Option<Self> {
        let mut numbers = version.strip_prefix("GLIBC_")?.split('.').map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(major)), Some(Ok(minor))) => Some(Self(major, minor)),
            _ => None,
        }
    }
}

impl fmt::Display for Glibc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// A program header.
struct Segment {
    kind: u32,
    flags: u32,
    offset: u64,
    address: u64,
    size: u64,
}

struct File<'a>(&'a [u8]);

impl File<'_> {
    fn segments(&self) -> Result<Vec<Segment>, ElfError> {
        let (start, size, count) = (self.u64(0x20)?, self.u16(0x36)?, self.u16(0x38)?);
        let header = |number: u16| {
            let at = start.saturating_add(u64::from(number) * u64::from(size));
            Ok(Segment {
                kind: self.u32(at)?,
                flags: self.u32(at.saturating_add(4))?,
                offset: self.u64(at.saturating_add(8))?,
                address: self.u64(at.saturating_add(16))?,
                size: self.u64(at.saturating_add(32))?,
            })
        };
        (0..count).map(header).collect()
    }

    /// Tags and values; empty for a static program.
    fn dynamic(&self, segments: &[Segment]) -> Result<Vec<(u64, u64)>, ElfError> {
        let Some(segment) = segments.iter().find(|segment| segment.kind == DYNAMIC) else {
            return Ok(Vec::new());
        };
        let mut entries = Vec::new();
        for number in 0..segment.size / 16 {
            let at = segment.offset.saturating_add(number * 16);
            match self.u64(at)? {
                END => break,
                tag => entries.push((tag, self.u64(at.saturating_add(8))?)),
            }
        }
        Ok(entries)
    }

    /// Two linked lists: of libraries, and for each of the versions that are wanted of it.
    fn versions(&self, start: u64, count: u64, strings: u64) -> Result<Vec<String>, ElfError> {
        let mut names = Vec::new();
        let mut library = start;
        for _ in 0..count {
            let mut version = library.saturating_add(self.u32(library.saturating_add(8))?.into());
            for _ in 0..self.u16(library.saturating_add(2))? {
                let name = self.u32(version.saturating_add(8))?;
                names.push(self.text(strings.saturating_add(name.into()))?);
                version = version.saturating_add(self.u32(version.saturating_add(12))?.into());
            }
            library = library.saturating_add(self.u32(library.saturating_add(12))?.into());
        }
        Ok(names)
    }

    fn has_symbols(&self) -> Result<bool, ElfError> {
        let (start, size, count) = (self.u64(0x28)?, self.u16(0x3a)?, self.u16(0x3c)?);
        for number in 0..count {
            let at = start.saturating_add(u64::from(number) * u64::from(size));
            if self.u32(at.saturating_add(4))? == SYMBOLS {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn text(&self, at: u64) -> Result<String, ElfError> {
        let rest = usize::try_from(at).ok().and_then(|at| self.0.get(at..)).ok_or(ElfError::Short(at))?;
        let end = rest.iter().position(|byte| *byte == 0).ok_or(ElfError::Short(at))?;
        Ok(String::from_utf8_lossy(&rest[..end]).into_owned())
    }

    fn bytes<const N: usize>(&self, at: u64) -> Result<[u8; N], ElfError> {
        let bytes = usize::try_from(at).ok().and_then(|at| self.0.get(at..)?.first_chunk());
        bytes.copied().ok_or(ElfError::Short(at))
    }

    fn u16(&self, at: u64) -> Result<u16, ElfError> {
        self.bytes(at).map(u16::from_le_bytes)
    }

    fn u32(&self, at: u64) -> Result<u32, ElfError> {
        self.bytes(at).map(u32::from_le_bytes)
    }

    fn u64(&self, at: u64) -> Result<u64, ElfError> {
        self.bytes(at).map(u64::from_le_bytes)
    }
}

/// Where in the file the byte is that will be at `address` in memory.
fn offset(segments: &[Segment], address: u64) -> Result<u64, ElfError> {
    let holds = |segment: &&Segment| {
        segment.kind == LOAD && address.checked_sub(segment.address).is_some_and(|into| into < segment.size)
    };
    let segment = segments.iter().find(holds).ok_or(ElfError::Address(address))?;
    Ok(segment.offset.saturating_add(address - segment.address))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program that was linked for this machine: the test itself.
    fn ourselves() -> Vec<u8> {
        std::fs::read(std::env::current_exe().unwrap()).unwrap()
    }

    #[test]
    fn own_executable_requires_libc() {
        let needs = ElfRequirements::of(&ourselves()).unwrap();
        assert!(needs.libraries.iter().any(|name| name == "libc.so.6"), "{needs:?}");
        assert!(needs.glibc().unwrap() >= Glibc(2, 17), "{needs:?}");
        assert!(!needs.executable_stack && needs.symbols, "{needs:?}");
    }

    #[test]
    fn truncated_file_is_an_error() {
        assert_eq!(ElfRequirements::of(b"#!/bin/sh\n"), Err(ElfError::Magic));
        let whole = ourselves();
        for len in (0..0x2000).step_by(7).chain([whole.len() / 2]) {
            assert!(ElfRequirements::of(&whole[..len]).is_err(), "{len}");
        }
    }

    #[test]
    fn invalid_headers_are_an_error() {
        let mut file = ourselves();
        file[6..0x40].fill(0xff);
        assert!(matches!(ElfRequirements::of(&file), Err(ElfError::Short(_))));
    }

    #[test]
    fn glibc_versions_are_compared_numerically() {
        let needs = |versions: &[&str]| ElfRequirements {
            libraries: Vec::new(),
            versions: versions.iter().map(|&version| version.to_owned()).collect(),
            executable_stack: false,
            symbols: false,
        };
        assert_eq!(needs(&["GLIBC_2.9", "GLIBC_2.28", "GLIBC_2.2.5"]).glibc(), Some(Glibc(2, 28)));
        assert_eq!(needs(&["GCC_3.0", "GLIBC_PRIVATE"]).glibc(), None);
        assert_eq!(Glibc(2, 28).to_string(), "2.28");
    }
}
