//! `cargo xtask sbom`: the bill of materials, a CycloneDX document of everything that the program and the extension of Python
//! are made of.
//!
//! Owns the form of the document (<https://cyclonedx.org/docs/1.5/json/>); the facts are of [`crate::closure`].
//!
//! maturin could write one, too. It would describe the extension only, name crates that only other systems compile and
//! folders of this machine, and differ from build to build. This one follows from the sources alone, so it has neither a time
//! nor a serial number.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::closure::{Closure, ClosureError, Package, PackageId, Shipped};
use crate::command::{Command, CommandError};
use crate::machine::Machine;
use crate::wheel;

/// Name of the file.
pub(crate) const FILE: &str = "moontide.cdx.json";

/// Why there is no bill of materials.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SbomError {
    #[error(transparent)]
    Closure(#[from] ClosureError),
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error("cannot write {path}: {source}")]
    Write { path: String, source: std::io::Error },
}

/// Writes it into the target directory.
pub(crate) fn run(root: &Path, machine: &Machine) -> Result<(), SbomError> {
    let path = write(root, &Shipped::of(root)?, &root.join(&machine.target_dir))?;
    println!("{}", path.display());
    Ok(())
}

/// Writes it into `directory` and returns its path.
pub(crate) fn write(root: &Path, shipped: &Shipped, directory: &Path) -> Result<PathBuf, SbomError> {
    let rustc = Command::new("rustc", &["--version"]).output(root)?;
    let rustc = ("rustc", rustc.split(' ').nth(1).unwrap_or_default());
    let tools: Vec<_> = wheel::TOOLS.iter().filter_map(|tool| tool.split_once("==")).chain([rustc]).collect();
    let version = &shipped.extension.root.version;
    let document = document(&[&shipped.program, &shipped.extension], version, &tools);
    let path = directory.join(FILE);
    let write = || {
        std::fs::create_dir_all(directory)?;
        std::fs::write(&path, format!("{document:#}\n"))
    };
    write().map_err(|source| SbomError::Write { path: path.display().to_string(), source })?;
    Ok(path)
}

/// `tools` are the names and versions of the programs that build what ships.
fn document(closures: &[&Closure], version: &str, tools: &[(&str, &str)]) -> Value {
    let components: Vec<Value> =
        merged(closures).iter().map(|(id, package)| component(id, package)).collect();
    let roots: Vec<String> = closures.iter().map(|closure| reference(&closure.root)).collect();
    let mut dependencies = vec![json!({"ref": "moontide", "dependsOn": roots})];
    for (id, package) in merged(closures) {
        let names: Vec<String> = package.dependencies.iter().map(reference).collect();
        dependencies.push(json!({"ref": reference(&id), "dependsOn": names}));
    }
    let tools: Vec<Value> = tools
        .iter()
        .map(|(name, version)| json!({"type": "application", "name": name, "version": version}))
        .collect();
    json!({
        "$schema": "http://cyclonedx.org/schema/bom-1.5.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "tools": {"components": tools},
            "component": {
                "type": "application",
                "bom-ref": "moontide",
                "name": "moontide",
                "version": version,
                "purl": format!("pkg:pypi/moontide@{version}"),
                "licenses": [{"expression": "Apache-2.0"}],
            },
        },
        "components": components,
        "dependencies": dependencies,
    })
}

/// What is linked into one of them is linked.
fn merged(closures: &[&Closure]) -> BTreeMap<PackageId, Package> {
    let mut all = BTreeMap::<PackageId, Package>::new();
    for (id, package) in closures.iter().flat_map(|closure| &closure.packages) {
        match all.get_mut(id) {
            Some(known) => {
                known.is_linked |= package.is_linked;
                known.dependencies.extend(package.dependencies.iter().cloned());
            }
            None => {
                all.insert(id.clone(), package.clone());
            }
        }
    }
    all
}

fn component(id: &PackageId, package: &Package) -> Value {
    let mut component = json!({
        "type": "library",
        "bom-ref": reference(id),
        "name": id.name,
        "version": id.version,
        // In the words of CycloneDX: whether it is there at run time.
        "scope": if package.is_linked { "required" } else { "excluded" },
    });
    if let Some(license) = &package.license {
        component["licenses"] = json!([{"expression": license}]);
    }
    if let Some(checksum) = &package.checksum {
        component["hashes"] = json!([{"alg": "SHA-256", "content": checksum}]);
    }
    // Ours are in no registry; a crate there with such a name would be another.
    if !package.is_local {
        let version = id.version.replace('+', "%2B");
        component["purl"] = json!(format!("pkg:cargo/{}@{version}", id.name));
    }
    component
}

fn reference(PackageId { name, version }: &PackageId) -> String {
    format!("{name}@{version}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::closure::tests::{id, sample};

    #[test]
    fn document_has_every_package_once_with_its_source() {
        let (program, mut extension) = (sample(), sample());
        // The extension links what the program only runs while it is built, and has a package of its own.
        extension.packages.get_mut(&id("b")).unwrap().is_linked = true;
        let own = PackageId { name: "e".to_owned(), version: "1.0.0+x".to_owned() };
        extension.packages.insert(own.clone(), extension.packages[&id("c")].clone());
        extension.packages.get_mut(&id("program")).unwrap().dependencies.insert(own);

        let document = document(&[&program, &extension], "0.1.0", &[("rustc", "1.95.0")]);
        let components = document["components"].as_array().unwrap();
        let names: Vec<&str> = components.iter().map(|each| each["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["a", "b", "c", "e", "m", "program"]);
        let find = |name| components.iter().find(|each| each["name"] == name).unwrap();
        assert_eq!(
            *find("a"),
            json!({
                "type": "library",
                "bom-ref": "a@1.0.0",
                "name": "a",
                "version": "1.0.0",
                "scope": "required",
                "licenses": [{"expression": "MIT OR Apache-2.0"}],
                "hashes": [{"alg": "SHA-256", "content": "12ab"}],
                "purl": "pkg:cargo/a@1.0.0",
            })
        );
        assert_eq!(find("b")["scope"], "required");
        assert_eq!(find("m")["scope"], "excluded");
        assert_eq!(find("e")["purl"], "pkg:cargo/e@1.0.0%2Bx");
        assert!(find("program").get("purl").is_none());
        assert_eq!(document["metadata"]["tools"]["components"][0]["name"], "rustc");
    }

    #[test]
    fn document_of_what_ships_has_licences_and_checksums_and_nothing_of_tests() {
        let shipped = Shipped::of(&crate::workspace_root()).unwrap();
        let document = document(&[&shipped.program, &shipped.extension], "0.1.0", &[]);
        let scope_of = |name: &str| {
            let components = document["components"].as_array().unwrap();
            components.iter().find(|each| each["name"] == name).map(|each| each["scope"].as_str().unwrap())
        };
        for linked in ["moontide-cli", "clap", "moontide-python", "pyo3", "moontide-heap", "rustls", "ring"] {
            assert_eq!(scope_of(linked), Some("required"), "{linked}");
        }
        for built in ["serde_derive", "prost-build"] {
            assert_eq!(scope_of(built), Some("excluded"), "{built}");
        }
        for absent in ["loom", "moontide-sim", "proptest", "windows-sys"] {
            assert_eq!(scope_of(absent), None, "{absent}");
        }
        for component in document["components"].as_array().unwrap() {
            let is_ours = component["name"].as_str().unwrap().starts_with("moontide-");
            assert!(component["licenses"].is_array(), "{component}");
            assert_eq!(component["hashes"].is_array(), !is_ours, "{component}");
            assert_eq!(component["purl"].is_string(), !is_ours, "{component}");
        }
        assert!(!document.to_string().contains("file:"), "it names directories of this machine");
    }

    #[test]
    fn every_reference_of_a_document_names_a_component() {
        let closure = sample();
        let document = document(&[&closure], "0.1.0", &[]);
        let references = |value: &Value, key: &str| -> Vec<String> {
            value.as_array().unwrap().iter().map(|each| each[key].as_str().unwrap().to_owned()).collect()
        };
        let mut known = references(&document["components"], "bom-ref");
        known.push("moontide".to_owned());
        let dependencies = &document["dependencies"];
        let mut with_dependencies = references(dependencies, "ref");
        assert_eq!(dependencies[0], json!({"ref": "moontide", "dependsOn": ["program@1.0.0"]}));
        for entry in dependencies.as_array().unwrap() {
            for name in entry["dependsOn"].as_array().unwrap() {
                assert!(known.iter().any(|known| known == name.as_str().unwrap()), "{name}");
            }
        }
        known.sort();
        with_dependencies.sort();
        assert_eq!(known, with_dependencies);
    }
}
