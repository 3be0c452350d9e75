//! Parser of the tables of `docs/formats.md`, so that tests can compare the page with the code.

#![allow(dead_code, unreachable_pub, missing_docs, reason = "each test file uses its own part")]

use moontide_types::record::Field;

const PAGE: &str = include_str!("../../../../docs/formats.md");

/// Returns the rows of the first table under a heading, as cells.
pub fn table(heading: &str) -> Vec<Vec<&'static str>> {
    let start = PAGE.find(&format!("\n## {heading}\n")).unwrap_or_else(|| panic!("no section {heading:?}"));
    let rows = PAGE[start..].lines().skip_while(|line| !line.starts_with('|'));
    let rows: Vec<Vec<&str>> = rows
        .take_while(|line| line.starts_with('|'))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    assert!(rows.len() > 2, "no table in section {heading:?}");
    rows[2..].to_vec()
}

/// Panics unless the table under `heading` has exactly these fields.
pub fn assert_fields(heading: &str, fields: &[Field]) {
    let rows = table(heading);
    let documented: Vec<(usize, usize, &str)> =
        rows.iter().map(|row| (row[0].parse().unwrap(), row[1].parse().unwrap(), row[2])).collect();
    let actual: Vec<(usize, usize, &str)> = fields.iter().map(|f| (f.offset, f.bytes, f.name)).collect();
    assert_eq!(documented, actual, "docs/formats.md, section {heading:?}, differs from the code");
}
