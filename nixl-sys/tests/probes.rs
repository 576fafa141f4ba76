//! Asking libfabric and UCX: libraries that answer, and everything else that may lie under their names.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use std::path::{Path, PathBuf};
use std::process::Command;

use nixl_sys::{ProbeError, fabric_symbols, libfabric, plugin_loads, ucx};
use tempfile::TempDir;

/// A library made of C.
fn library(folder: &TempDir, name: &str, code: &str) -> PathBuf {
    let source = folder.path().join(format!("{name}.c"));
    std::fs::write(&source, code).unwrap();
    let library = folder.path().join(name);
    let done = Command::new("cc")
        .args(["-shared", "-fPIC", "-w", "-o"])
        .args([&library, &source])
        .status()
        .unwrap();
    assert!(done.success());
    library
}

/// What answers like libfabric: two EFA endpoints of one device, one of them twice, and one of TCP.
const LIBFABRIC: &str = r#"
#include <stdint.h>
#include <stddef.h>
struct fabric { void *f; const char *name, *prov; uint32_t version, api; };
struct domain { void *d; const char *name; };
struct device { const char *name; };
struct bus { uint32_t type; uint16_t domain; uint8_t bus, device, function; };
struct link { const char *address; size_t mtu, speed; };
struct nic { size_t fid[3]; struct device *device; struct bus *bus; struct link *link; void *prov; };
struct info { struct info *next; uint64_t caps, mode; uint32_t format; size_t src_len, dst_len;
  void *src, *dst, *handle, *tx, *rx, *ep; struct domain *domain; struct fabric *fabric; struct nic *nic; };
const char *symbols = "FABRIC_1.9";
static struct fabric efa = {0, "efa", "efa", 0x00020005, 0}, tcp = {0, "10.0.0.0/24", "tcp;ofi_rxm", 0x00020005, 0};
static struct domain rdm = {0, "rdmap85s0-rdm"}, eth = {0, "eth0"};
static struct device device = {"rdmap85s0"};
static struct bus bus = {1, 0, 0x55, 0, 0};
static struct link lnk = {0, 0, 200000000000};
static struct nic nic = {{0}, &device, &bus, &lnk, 0};
static struct info c = {0, .domain = &eth, .fabric = &tcp}, b = {&c, .domain = &rdm, .fabric = &efa, .nic = &nic},
  a = {&b, .domain = &rdm, .fabric = &efa, .nic = &nic}, bare = {&a};
static int freed;
uint32_t fi_version(void) { return VERSION; }
int fi_getinfo(uint32_t v, void *n, void *s, uint64_t f, void *h, struct info **i) { if (STATUS == 0) *i = &bare; return STATUS; }
void fi_freeinfo(struct info *i) { freed++; }
"#;

fn fake(version: &str, status: &str) -> String {
    format!("#define VERSION {version}\n#define STATUS {status}\n{LIBFABRIC}")
}

#[test]
fn libfabric_says_what_it_has() {
    let folder = tempfile::tempdir().unwrap();
    let file = library(&folder, "libfabric.so.1", &fake("0x00020005", "0"));
    let report = libfabric(&file).unwrap();
    assert_eq!(report.version.to_string(), "2.5");
    assert_eq!(report.providers.len(), 3, "{:?}", report.providers);
    let efa: Vec<_> = report.of("efa").collect();
    let [efa] = efa.as_slice() else {
        panic!("{efa:?}")
    };
    assert_eq!(
        (efa.domain.as_str(), efa.version.to_string().as_str()),
        ("rdmap85s0-rdm", "2.5")
    );
    let nic = efa.nic.as_ref().unwrap();
    assert_eq!(
        (nic.name.as_str(), nic.pci),
        ("rdmap85s0", Some((0, 0x55, 0, 0)))
    );
    assert_eq!(nic.bits_per_second, 200_000_000_000);
    assert_eq!(report.of("tcp").count(), 1);
    assert_eq!(fabric_symbols(&file).unwrap().to_string(), "1.9");
}

#[test]
fn a_libfabric_with_nothing_to_offer_is_no_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = library(&folder, "empty.so", &fake("0x00010014", "-61"));
    assert!(libfabric(&file).unwrap().providers.is_empty());
    let file = library(&folder, "failing.so", &fake("0x00010014", "-22"));
    assert!(matches!(
        libfabric(&file),
        Err(ProbeError::Failed { status: -22, .. })
    ));
}

#[test]
fn what_is_not_libfabric_is_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let missing = libfabric(Path::new("/not/there/libfabric.so.1"));
    assert!(
        matches!(missing, Err(ProbeError::Missing { .. })),
        "{missing:?}"
    );
    let missing = libfabric(Path::new("libfabric-of-nobody.so.1"));
    assert!(
        matches!(missing, Err(ProbeError::Missing { .. })),
        "{missing:?}"
    );
    let text = folder.path().join("text.so");
    std::fs::write(&text, "not a library").unwrap();
    assert!(matches!(
        libfabric(&text),
        Err(ProbeError::NotALibrary { .. })
    ));
    assert!(matches!(
        libfabric(folder.path()),
        Err(ProbeError::NotALibrary { .. })
    ));
    let torn = folder.path().join("torn.so");
    std::fs::write(&torn, b"\x7fELF and then nothing").unwrap();
    assert!(matches!(
        libfabric(&torn),
        Err(ProbeError::DynamicLinker { .. })
    ));
    let other = library(&folder, "other.so", "int something_else;");
    let error = libfabric(&other).unwrap_err();
    assert!(error.to_string().contains("has no fi_version"), "{error}");
    let half = library(
        &folder,
        "half.so",
        "unsigned fi_version(void) { return 0x00020000; }",
    );
    assert!(matches!(
        libfabric(&half),
        Err(ProbeError::MissingFunction {
            function: "fi_getinfo",
            ..
        })
    ));
    let old = library(&folder, "old.so", &fake("0x00010005", "0"));
    let error = libfabric(&old).unwrap_err();
    assert!(
        error.to_string().contains("version 1.5, at least 1.9"),
        "{error}"
    );
}

#[test]
fn what_is_not_ucx_is_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    assert!(matches!(
        ucx(Path::new("/not/there/libucp.so")),
        Err(ProbeError::Missing { .. })
    ));
    let other = library(&folder, "libucp.so.0", "int something_else;");
    assert!(matches!(
        ucx(&other),
        Err(ProbeError::MissingFunction {
            function: "ucp_get_version",
            ..
        })
    ));
    let old = library(
        &folder,
        "old.so",
        "void ucp_get_version(unsigned *a, unsigned *b, unsigned *c) { *a = 1; *b = 4; *c = 0; }",
    );
    let error = ucx(&old).unwrap_err();
    assert!(
        error.to_string().contains("version 1.4.0, at least 1.10"),
        "{error}"
    );
}

/// UCX as far as it is asked, with a way to fail.
const UCX: &str = r##"
#include <stdio.h>
#include <stdint.h>
void ucp_get_version(unsigned *a, unsigned *b, unsigned *c) { *a = 1; *b = 22; *c = 0; }
int ucp_config_read(const char *p, const char *f, void **c) { *c = "config"; return 0; }
void ucp_config_release(void *c) { }
int ucp_init_version(unsigned a, unsigned b, const uint64_t *p, void *g, void **c) {
  if (p[0] != 1 || p[1] == 0) return -5;
  *c = "context"; return STATUS; }
void ucp_cleanup(void *c) { }
void ucp_context_print_info(void *c, FILE *f) {
  fprintf(f, "#      resource 0  :  md 0  dev 0  flags -- srd/rdmap85s0:1\n# resource 1 : md 1 dev 1 flags -- tcp/eth0\n"); }
"##;

#[test]
fn ucx_says_what_it_can_use() {
    let folder = tempfile::tempdir().unwrap();
    let file = library(&folder, "libucp.so.0", &format!("#define STATUS 0\n{UCX}"));
    let report = ucx(&file).unwrap();
    assert_eq!(report.version, "1.22.0");
    let names: Vec<String> = report.resources.iter().map(ToString::to_string).collect();
    assert_eq!(names, ["srd/rdmap85s0:1", "tcp/eth0"]);
    let nothing = library(&folder, "nothing.so", &format!("#define STATUS -6\n{UCX}"));
    assert!(matches!(
        ucx(&nothing),
        Err(ProbeError::Failed {
            function: "ucp_init_version",
            status: -6,
            ..
        })
    ));
}

#[test]
fn a_plugin_that_does_not_load_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let good = library(&folder, "good.so", "int fine;");
    plugin_loads(&good).unwrap();
    assert!(plugin_loads(&folder.path().join("gone.so")).is_err());
    let bad = library(
        &folder,
        "bad.so",
        "extern int nowhere(void); int use(void) { return nowhere(); }",
    );
    let error = plugin_loads(&bad).unwrap_err();
    assert!(error.to_string().contains("nowhere"), "{error}");
}
