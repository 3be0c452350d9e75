//! Inventory of `unsafe`: how often it stands where, compared with a table in the repository.
//!
//! Owns the scan and the comparison. The scan reads tokens, so that comments and strings do not count and the bodies of
//! macros do. The table, [`TABLE`], has a row for each directory of a crate with `unsafe` in it; a number that differs from
//! it in either direction is a finding, so that each change of a number is a line of a commit. What is compiled as a crate
//! of its own from a directory without a row forbids `unsafe` to the compiler, too. Tests and benches need not: the table
//! is enough for what does not ship.
//!
//! Types of function pointers (`unsafe fn(..)`) are not counted: the caller needs a block.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use serde_json::Value;

use super::Finding;
use super::crates::{MetadataError, list, text};
use super::tree::Tree;

/// The numbers that were agreed on, as a table in Markdown.
const TABLE: &str = "xtask/unsafe.md";
/// First cell of its header.
const HEADER: &str = "directory";

/// Kinds of targets that ship, or that a reader copies from.
const FORBIDDING_KINDS: &[&str] = &["bin", "cdylib", "custom-build", "example", "lib", "rlib"];

/// How often each form stands in a directory.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Counts {
    /// `unsafe { .. }`
    blocks: u32,
    /// `unsafe fn`, also as a method and as a declaration in a trait or in an `extern` block.
    functions: u32,
    /// `unsafe impl`
    impls: u32,
    /// Traits, `extern` blocks, attributes such as `unsafe(no_mangle)`, and every form that the scan does not know.
    other: u32,
}

/// The counts by directory, without directories that have none.
pub(super) type Inventory = BTreeMap<String, Counts>;

/// Source file of a target that is a crate of its own, from the workspace root.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Root {
    path: String,
}

/// What stands in the tree, and a finding for each file that cannot be read.
pub(super) fn inventory(tree: &Tree) -> (Inventory, Vec<Finding>) {
    let (mut found, mut findings) = (Inventory::new(), vec![]);
    for (path, source) in tree.files().filter(|(path, _)| path.ends_with(".rs")) {
        let mut counts = Counts::default();
        match source.parse() {
            Ok(tokens) => count(tokens, &mut counts),
            Err(error) => findings.push(Finding::new(path, format!("cannot be read as Rust: {error}"))),
        }
        if counts != Counts::default() {
            found.entry(directory(path)).or_default().add(counts);
        }
    }
    (found, findings)
}

/// Compares the inventory with the table, cell by cell.
pub(super) fn ratchet(tree: &Tree, found: &Inventory) -> Vec<Finding> {
    let Some(table) = tree.text(TABLE) else {
        return vec![Finding::new(TABLE, "is missing; `cargo xtask tidy --unsafe` prints it")];
    };
    let mut findings = vec![];
    let mut agreed = Inventory::new();
    for (number, line) in (1..).zip(table.lines()) {
        match parse_row(line) {
            Row::Counts(directory, counts) => {
                if agreed.insert(directory.to_owned(), counts).is_some() {
                    findings
                        .push(Finding::new(format!("{TABLE}:{number}"), format!("repeats `{directory}`")));
                }
            }
            Row::Invalid => {
                let what = "is no row of four numbers; `cargo xtask tidy --unsafe` prints the table";
                findings.push(Finding::new(format!("{TABLE}:{number}"), what));
            }
            Row::None => {}
        }
    }
    let none = Counts::default();
    let mut directories: Vec<&String> = found.keys().chain(agreed.keys()).collect();
    directories.sort();
    directories.dedup();
    for directory in directories {
        let there = found.get(directory).unwrap_or(&none).cells();
        let agreed = agreed.get(directory).unwrap_or(&none).cells();
        for ((name, is), (_, was)) in there.into_iter().zip(agreed) {
            let what = match is.cmp(&was) {
                std::cmp::Ordering::Equal => continue,
                std::cmp::Ordering::Greater => format!(
                    "has {is} unsafe {name}, and {TABLE} says {was}: write it without; if it is right, raise the \
                     number in the same commit and say why"
                ),
                std::cmp::Ordering::Less => format!(
                    "has {is} unsafe {name}, and {TABLE} says {was}: lower the number, so that it stays there"
                ),
            };
            findings.push(Finding::new(directory, what));
        }
    }
    findings
}

/// What is compiled from a directory without `unsafe` forbids it.
pub(super) fn forbidden(tree: &Tree, roots: &[Root], found: &Inventory) -> Vec<Finding> {
    let without = roots.iter().filter(|root| !found.contains_key(&directory(&root.path)));
    let missing = without.filter(|root| !tree.text(&root.path).is_some_and(forbids));
    missing
        .map(|root| {
            Finding::new(&root.path, "has no unsafe code; add `#![forbid(unsafe_code)]` so that it stays so")
        })
        .collect()
}

/// The targets of the workspace that [`forbidden`] reads, from `cargo metadata --no-deps`.
pub(super) fn roots(json: &str) -> Result<Vec<Root>, MetadataError> {
    let metadata: Value = serde_json::from_str(json)?;
    let workspace = text(&metadata, "workspace_root")?;
    let mut roots = vec![];
    for package in list(&metadata, "packages")? {
        for target in list(package, "targets")? {
            let kinds = list(target, "kind")?;
            if kinds.iter().any(|kind| kind.as_str().is_some_and(|kind| FORBIDDING_KINDS.contains(&kind))) {
                let path = without_parents(&text(target, "src_path")?);
                let inside = path.strip_prefix(&workspace).and_then(|path| path.strip_prefix('/'));
                let inside = inside.ok_or(MetadataError::Missing("src_path in the workspace"))?;
                roots.push(Root { path: inside.to_owned() });
            }
        }
    }
    Ok(roots)
}

/// A target outside of its package has `..` in its path.
fn without_parents(path: &str) -> String {
    let mut names: Vec<&str> = vec![];
    for name in path.split('/') {
        if name == ".." {
            names.pop();
        } else {
            names.push(name);
        }
    }
    names.join("/")
}

/// The table as it should be, and the sum of each column.
pub(super) fn table(found: &Inventory) -> String {
    let mut text = String::new();
    let mut total = Counts::default();
    let names = total.cells().map(|(name, _)| name);
    let _ = writeln!(text, "| {HEADER} | {} |", names.join(" | "));
    let _ = writeln!(text, "|---|{}", "---|".repeat(names.len()));
    for (directory, counts) in found {
        let cells = counts.cells().map(|(_, number)| number.to_string());
        let _ = writeln!(text, "| {directory} | {} |", cells.join(" | "));
        total.add(*counts);
    }
    let sums = total.cells().map(|(name, number)| format!("{number} {name}"));
    let _ = writeln!(text, "\nTotal: {}", sums.join(", "));
    text
}

impl Counts {
    fn cells(&self) -> [(&'static str, u32); 4] {
        [("blocks", self.blocks), ("functions", self.functions), ("impls", self.impls), ("other", self.other)]
    }

    fn add(&mut self, more: Self) {
        self.blocks += more.blocks;
        self.functions += more.functions;
        self.impls += more.impls;
        self.other += more.other;
    }
}

/// What a line of the table says.
enum Row<'a> {
    Counts(&'a str, Counts),
    Invalid,
    /// Prose, the header, or the line below it.
    None,
}

fn parse_row(line: &str) -> Row<'_> {
    let Some(cells) = line.strip_prefix('|') else { return Row::None };
    let cells: Vec<&str> = cells.trim_end().trim_end_matches('|').split('|').map(str::trim).collect();
    match cells.as_slice() {
        [HEADER | "---", ..] => Row::None,
        [directory, numbers @ ..] => {
            let numbers: Result<Vec<u32>, _> = numbers.iter().map(|cell| cell.parse()).collect();
            match numbers.as_deref() {
                Ok(&[blocks, functions, impls, other]) => {
                    Row::Counts(directory, Counts { blocks, functions, impls, other })
                }
                _ => Row::Invalid,
            }
        }
        [] => Row::Invalid,
    }
}

/// `crates/heap/src/cell.rs` belongs to `crates/heap/src`, `xtask/src/main.rs` to `xtask/src`.
fn directory(path: &str) -> String {
    let depth = if path.starts_with("crates/") { 3 } else { 2 };
    path.split('/').take(depth).collect::<Vec<_>>().join("/")
}

fn count(tokens: TokenStream, counts: &mut Counts) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    for (at, token) in tokens.iter().enumerate() {
        match token {
            TokenTree::Group(group) => count(group.stream(), counts),
            // A raw identifier, `r#unsafe`, is another word.
            TokenTree::Ident(word) if word == "unsafe" => {
                if let Some(counter) = counts.counter(&tokens[at + 1..]) {
                    *counter += 1;
                }
            }
            _ => {}
        }
    }
}

impl Counts {
    /// Where to count an `unsafe` that these tokens follow.
    fn counter(&mut self, rest: &[TokenTree]) -> Option<&mut u32> {
        let is = |token: Option<&TokenTree>, name: &str| matches!(token, Some(TokenTree::Ident(word)) if word == name);
        // `extern`, or `extern "C"`.
        let abi = match rest {
            [first, TokenTree::Literal(_), ..] if is(Some(first), "extern") => 2,
            [first, ..] if is(Some(first), "extern") => 1,
            _ => 0,
        };
        match rest.first() {
            Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => Some(&mut self.blocks),
            first if is(first, "impl") => Some(&mut self.impls),
            _ if is(rest.get(abi), "fn") => match rest.get(abi + 1) {
                Some(TokenTree::Group(_)) => None,
                _ => Some(&mut self.functions),
            },
            _ => Some(&mut self.other),
        }
    }
}

/// Whether `#![forbid(unsafe_code)]` stands at the top of the file.
fn forbids(source: &str) -> bool {
    let Ok(tokens) = source.parse::<TokenStream>() else { return false };
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let is = |token: &TokenTree, sign| matches!(token, TokenTree::Punct(punct) if punct.as_char() == sign);
    tokens.windows(3).any(|three| match three {
        [hash, bang, TokenTree::Group(attribute)] if is(hash, '#') && is(bang, '!') => {
            let words: String = attribute.stream().into_iter().map(|token| token.to_string()).collect();
            words == "forbid(unsafe_code)"
        }
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts_of(source: &str) -> [u32; 4] {
        let mut counts = Counts::default();
        count(source.parse().unwrap(), &mut counts);
        counts.cells().map(|(_, number)| number)
    }

    #[test]
    fn each_form_of_unsafe_is_counted_once() {
        for (source, expected) in [
            ("fn f() { unsafe { g() } }", [1, 0, 0, 0]),
            ("fn f() { let x = [unsafe { g() }, unsafe { h(unsafe { i() }) }]; }", [3, 0, 0, 0]),
            ("unsafe fn f() {}", [0, 1, 0, 0]),
            ("pub(crate) const unsafe extern \"C\" fn f() { unsafe { g() } }", [1, 1, 0, 0]),
            ("unsafe extern fn f() {}", [0, 1, 0, 0]),
            ("trait T { unsafe fn f(&self); }", [0, 1, 0, 0]),
            ("unsafe impl Send for X {} unsafe impl<T> Sync for Y<T> {}", [0, 0, 2, 0]),
            ("unsafe trait T {}", [0, 0, 0, 1]),
            ("unsafe extern \"C\" { fn f(); unsafe fn g(); }", [0, 1, 0, 1]),
            ("#[unsafe(no_mangle)] extern \"C\" fn f() {}", [0, 0, 0, 1]),
            // A form that does not exist yet.
            ("struct X { unsafe field: u8 }", [0, 0, 0, 1]),
        ] {
            assert_eq!(counts_of(source), expected, "{source}");
        }
    }

    #[test]
    fn unsafe_in_bodies_of_macros_is_counted() {
        let source = "macro_rules! m { ($name:ident) => { unsafe fn $name() {} }; () => { unsafe { f() } } }
                      fn f() { assert!(unsafe { g() }); }";
        assert_eq!(counts_of(source), [2, 1, 0, 0]);
        assert_eq!(
            counts_of("macro_rules! m { ($n:ident) => { unsafe extern \"C\" fn $n() {} } }"),
            [0, 1, 0, 0]
        );
    }

    #[test]
    fn comments_strings_and_types_are_not_counted() {
        for source in [
            "// unsafe { }\n/* unsafe { } /* unsafe fn f() */ unsafe impl */\n/// unsafe { f() }\nfn f() {}",
            "//! unsafe { }\n",
            "const A: &str = \"unsafe { } \\\" unsafe { }\"; const B: &str = r#\"unsafe \" { }\"#;",
            "const C: &[u8] = b\"unsafe {\"; const D: char = '\"'; const E: &CStr = c\"unsafe { }\";",
            "fn f<'a>(x: &'a str) -> char { '\\'' }",
            "#![forbid(unsafe_code)]\n#![deny(unsafe_op_in_unsafe_fn)]",
            "type F = unsafe fn(u8); struct S { g: Option<unsafe extern \"C\" fn(u8) -> u8> }",
            "let r#unsafe = 1; let is_unsafe = 2;",
        ] {
            assert_eq!(counts_of(source), [0; 4], "{source}");
        }
    }

    #[test]
    fn inventory_adds_files_of_a_directory() {
        let block = "fn f() { unsafe { g() } }";
        let tree = Tree::of(&[
            ("crates/heap/src/a.rs", block),
            ("crates/heap/src/b/c.rs", block),
            ("crates/heap/tests/d.rs", block),
            ("crates/proto/build.rs", block),
            ("crates/meta/src/lib.rs", "fn f() {}"),
            ("examples/rust/e.rs", block),
            ("docs/f.md", block),
            ("fuzz/src/lib.rs", "fn f( {"),
        ]);
        let (found, findings) = inventory(&tree);
        let blocks: Vec<_> =
            found.iter().map(|(directory, counts)| (directory.as_str(), counts.blocks)).collect();
        assert_eq!(
            blocks,
            [
                ("crates/heap/src", 2),
                ("crates/heap/tests", 1),
                ("crates/proto/build.rs", 1),
                ("examples/rust", 1)
            ]
        );
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].location, "fuzz/src/lib.rs");
    }

    /// What differs if the sources of `crates/heap` have one block and the table is this.
    fn compare(table: &str) -> Vec<String> {
        let tree = Tree::of(&[("crates/heap/src/a.rs", "fn f() { unsafe { g() } }"), (TABLE, table)]);
        ratchet(&tree, &inventory(&tree).0).iter().map(Finding::to_string).collect()
    }

    #[test]
    fn number_that_differs_from_the_table_is_reported() {
        assert!(compare("| crates/heap/src | 1 | 0 | 0 | 0 |").is_empty());
        let risen = compare("| crates/heap/src | 0 | 0 | 0 | 0 |");
        assert!(
            matches!(&risen[..], [one] if one.starts_with("crates/heap/src: has 1 unsafe blocks")),
            "{risen:?}"
        );
        assert!(risen[0].contains("raise the number in the same commit"), "{risen:?}");
        assert_eq!(compare("No row at all."), risen);

        let fallen = compare("| crates/heap/src | 2 | 0 | 1 | 0 |");
        assert!(
            matches!(&fallen[..], [blocks, impls] if blocks.contains("says 2: lower") && impls.contains("says 1: lower")),
            "{fallen:?}"
        );
        let gone = compare("| crates/heap/src | 1 | 0 | 0 | 0 |\n| crates/gone/src | 0 | 3 | 0 | 0 |");
        assert!(
            matches!(&gone[..], [one] if one.starts_with("crates/gone/src: has 0 unsafe functions")),
            "{gone:?}"
        );
    }

    #[test]
    fn table_that_cannot_be_read_is_reported() {
        for table in ["| crates/heap/src | 1 | 0 | 0 |", "| crates/heap/src | 1 | 0 | few | 0 |"] {
            let findings = compare(table);
            assert!(
                findings.iter().any(|finding| finding.starts_with("xtask/unsafe.md:1: is no row")),
                "{findings:?}"
            );
        }
        let row = "| crates/heap/src | 1 | 0 | 0 | 0 |";
        let twice = compare(&format!("{row}\n{row}"));
        assert!(matches!(&twice[..], [one] if one.contains("repeats")), "{twice:?}");
        let none = ratchet(&Tree::of(&[]), &Inventory::new());
        assert!(matches!(&none[..], [one] if one.what.contains("is missing")), "{none:?}");
    }

    #[test]
    fn printed_table_is_the_one_that_is_compared() {
        let tree = Tree::of(&[
            ("crates/heap/src/a.rs", "unsafe fn f() { unsafe { g() } }"),
            ("xtask/src/b.rs", "unsafe impl Send for X {}"),
        ]);
        let (found, _) = inventory(&tree);
        let table = table(&found);
        assert!(table.ends_with("Total: 1 blocks, 1 functions, 1 impls, 0 other\n"), "{table}");
        assert_eq!(ratchet(&Tree::of(&[(TABLE, &table)]), &found), []);
    }

    #[test]
    fn root_without_unsafe_must_forbid_it() {
        let tree = Tree::of(&[
            ("crates/meta/src/lib.rs", "//! Meta.\n#![forbid(unsafe_code)]\n"),
            ("crates/types/src/lib.rs", "//! `#![forbid(unsafe_code)]` is only a comment here.\n"),
            ("crates/proto/build.rs", "fn main() { const X: &str = \"#![forbid(unsafe_code)]\"; }"),
            ("crates/tasks/src/lib.rs", "#![deny(unsafe_code)]"),
            ("crates/heap/src/lib.rs", "fn f() { unsafe { g() } }"),
        ]);
        let roots: Vec<Root> = tree.files().map(|(path, _)| Root { path: path.to_owned() }).collect();
        let findings = forbidden(&tree, &roots, &inventory(&tree).0);
        let locations: Vec<&str> = findings.iter().map(|finding| finding.location.as_str()).collect();
        assert_eq!(
            locations,
            ["crates/proto/build.rs", "crates/tasks/src/lib.rs", "crates/types/src/lib.rs"]
        );
    }

    #[test]
    fn targets_that_ship_are_roots() {
        let json = r#"{"workspace_root": "/w", "packages": [{"targets": [
            {"kind": ["lib"], "src_path": "/w/crates/heap/src/lib.rs"},
            {"kind": ["test"], "src_path": "/w/crates/heap/tests/heap.rs"},
            {"kind": ["custom-build"], "src_path": "/w/crates/heap/build.rs"},
            {"kind": ["example"], "src_path": "/w/crates/heap/../../examples/rust/get.rs"}
        ]}]}"#;
        let paths: Vec<String> = roots(json).unwrap().into_iter().map(|root| root.path).collect();
        assert_eq!(paths, ["crates/heap/src/lib.rs", "crates/heap/build.rs", "examples/rust/get.rs"]);
        assert!(roots(r#"{"workspace_root": "/w"}"#).is_err());
    }
}
