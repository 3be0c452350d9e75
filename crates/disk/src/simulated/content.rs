//! [`Content`]: sparse bytes of a file. Copies share their pages.
//!
//! Invariant: bytes at and after the length are zero, so that a file that grows shows zeros.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::SECTOR_BYTES;

/// Unit that is shared or copied.
pub(super) const PAGE_BYTES: usize = 4096;

/// Sectors of a page: one bit each in a byte.
pub(super) const PAGE_SECTORS: usize = PAGE_BYTES / SECTOR_BYTES;

const _: () = assert!(PAGE_SECTORS == 8);

type Page = [u8; PAGE_BYTES];

/// Bytes of a file.
#[derive(Clone, Debug, Default)]
pub(super) struct Content {
    len: u64,
    /// By number. A missing page is all zeros.
    pages: BTreeMap<u64, Arc<Page>>,
}

/// A part of one page.
pub(super) struct Part {
    pub(super) page: u64,
    /// First byte in the page.
    pub(super) start: usize,
    pub(super) len: usize,
}

/// Returns the parts of pages in a range of bytes.
pub(super) fn parts(offset: u64, len: usize) -> impl Iterator<Item = Part> {
    let end = offset + len as u64;
    let mut at = offset;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let start = (at % PAGE_BYTES as u64) as usize;
        let len = ((end - at) as usize).min(PAGE_BYTES - start);
        let part = Part { page: at / PAGE_BYTES as u64, start, len };
        at += len as u64;
        Some(part)
    })
}

impl Content {
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Truncates, or appends zeros.
    pub(super) fn set_len(&mut self, len: u64) {
        if len < self.len {
            drop(self.pages.split_off(&len.div_ceil(PAGE_BYTES as u64)));
            let rest = (len % PAGE_BYTES as u64) as usize;
            if let Some(page) = self.pages.get_mut(&(len / PAGE_BYTES as u64)) {
                Arc::make_mut(page)[rest..].fill(0);
            }
        }
        self.len = len;
    }

    /// Reads available bytes. Returns fewer than requested at the end of the file.
    pub(super) fn read(&self, offset: u64, buffer: &mut [u8]) -> usize {
        let len = self.len.saturating_sub(offset).min(buffer.len() as u64) as usize;
        let mut done = 0;
        for part in parts(offset, len) {
            let target = &mut buffer[done..done + part.len];
            match self.pages.get(&part.page) {
                Some(page) => target.copy_from_slice(&page[part.start..part.start + part.len]),
                None => target.fill(0),
            }
            done += part.len;
        }
        len
    }

    /// Writes bytes, and extends the file if necessary.
    pub(super) fn write(&mut self, offset: u64, bytes: &[u8]) {
        let mut done = 0;
        for part in parts(offset, bytes.len()) {
            let page = self.pages.entry(part.page).or_insert_with(|| Arc::new([0; PAGE_BYTES]));
            Arc::make_mut(page)[part.start..part.start + part.len]
                .copy_from_slice(&bytes[done..done + part.len]);
            done += part.len;
        }
        self.len = self.len.max(offset + bytes.len() as u64);
    }

    /// Takes some sectors of a page from another file, also past the length: [`Content::truncate`] must follow.
    pub(super) fn take_sectors(&mut self, from: &Content, page: u64, mask: u8) {
        if mask == u8::MAX {
            match from.pages.get(&page) {
                Some(bytes) => drop(self.pages.insert(page, bytes.clone())),
                None => drop(self.pages.remove(&page)),
            }
            return;
        }
        for sector in (0..PAGE_SECTORS).filter(|sector| mask & (1 << sector) != 0) {
            let range = sector * SECTOR_BYTES..(sector + 1) * SECTOR_BYTES;
            let source = from.pages.get(&page);
            let target = self.pages.entry(page).or_insert_with(|| Arc::new([0; PAGE_BYTES]));
            match source {
                Some(bytes) => Arc::make_mut(target)[range.clone()].copy_from_slice(&bytes[range]),
                None => Arc::make_mut(target)[range].fill(0),
            }
        }
    }

    /// Returns the stored pages from `page` on.
    pub(super) fn pages_from(&self, page: u64) -> impl Iterator<Item = u64> {
        self.pages.range(page..).map(|(page, _)| *page)
    }

    /// Sets the length, and clears all bytes past it.
    pub(super) fn truncate(&mut self, len: u64) {
        self.len = u64::MAX;
        self.set_len(len);
    }
}
