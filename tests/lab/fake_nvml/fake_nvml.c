/*
 * A stand-in for libnvidia-ml.so.1 whose answers come from the text file $FAKE_NVML_CONF, read again on every call.
 *
 * Lines are `key=value`; the last one of a key counts.
 *
 *   count, driver, nvml, cuda          of the machine; init=CODE lets nvmlInit fail
 *   gpu.N.KEY, gpu.*.KEY               of one GPU, of every GPU that has no line of its own
 *   gpu.N.lost=1                       every call on GPU N answers 15 (GPU is lost)
 *   error.FUNCTION, gpu.N.error.FUNCTION = CODE
 *   sleep.FUNCTION=SECONDS             a driver call that hangs
 *   link.A-B, p2p.A-B.INDEX            topology level and peer status of a pair, A < B
 *   fabric.interface=1|2|3             newest version of the fabric structure that this driver knows
 *
 * The structures are those of nvml.h (CUDA 12.8). Functions that are not here answer "function not found" in the
 * bindings, as an old driver's would.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    GPU_IS_LOST = 15,
    VERSION_MISMATCH = 25,
};

enum { MAX_DEVICES = 64, MAX_SLICES = 8, LINE = 4096 };

/* A GPU, or a MIG slice of the GPU `parent`. */
struct device {
    int index;
    struct device *parent;
};

static struct device devices[MAX_DEVICES];
static struct device slices[MAX_DEVICES][MAX_SLICES];
static int initialised;

/* ---- the configuration file ---- */

static int setting(const char *key, char *value, size_t size)
{
    const char *path = getenv("FAKE_NVML_CONF");
    FILE *file = path ? fopen(path, "r") : NULL;
    size_t length = strlen(key);
    char line[LINE];
    int found = 0;

    if (file == NULL)
        return 0;
    while (fgets(line, sizeof line, file)) {
        if (strncmp(line, key, length) != 0 || line[length] != '=')
            continue;
        line[strcspn(line, "\n")] = '\0';
        snprintf(value, size, "%s", line + length + 1);
        found = 1;
    }
    fclose(file);
    return found;
}

static int device_setting(const struct device *device, const char *key, char *value, size_t size)
{
    char name[256];

    if (device->parent) {
        snprintf(name, sizeof name, "gpu.%d.mig.%d.%s", device->parent->index, device->index, key);
        return setting(name, value, size);
    }
    snprintf(name, sizeof name, "gpu.%d.%s", device->index, key);
    if (setting(name, value, size))
        return 1;
    snprintf(name, sizeof name, "gpu.*.%s", key);
    return setting(name, value, size);
}

static uint64_t number(const char *key, uint64_t fallback)
{
    char value[LINE];
    return setting(key, value, sizeof value) ? strtoull(value, NULL, 0) : fallback;
}

static uint64_t device_number(const struct device *device, const char *key, uint64_t fallback)
{
    char value[LINE];
    return device_setting(device, key, value, sizeof value) ? strtoull(value, NULL, 0) : fallback;
}

static int text(const struct device *device, const char *key, const char *fallback, char *out, unsigned size)
{
    char value[LINE];
    int found = device ? device_setting(device, key, value, sizeof value) : setting(key, value, sizeof value);

    if (!found)
        snprintf(value, sizeof value, "%s", fallback);
    if (strlen(value) + 1 > size)
        return INSUFFICIENT_SIZE;
    strcpy(out, value);
    return SUCCESS;
}

/* What every call does first: hang, fail or go on. */
static int enter(const struct device *device, const char *function)
{
    const struct device *gpu = device && device->parent ? device->parent : device;
    char key[256];
    uint64_t code;

    if (!initialised)
        return UNINITIALIZED;
    snprintf(key, sizeof key, "sleep.%s", function);
    sleep(number(key, 0));
    snprintf(key, sizeof key, "error.%s", function);
    if (gpu) {
        if (device_number(gpu, "lost", 0))
            return GPU_IS_LOST;
        code = device_number(gpu, key, 0);
        if (code)
            return code;
    }
    return number(key, 0);
}

#define ENTER(device)                              \
    do {                                           \
        int code_ = enter((device), __func__);     \
        if (code_ != SUCCESS)                      \
            return code_;                          \
    } while (0)

/* A function that answers one unsigned number of a GPU. */
#define NUMBER(function, key, fallback)                       \
    int function(struct device *device, unsigned *value)      \
    {                                                         \
        ENTER(device);                                        \
        *value = device_number(device, key, fallback);        \
        return SUCCESS;                                       \
    }

/* ---- the library ---- */

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    int code = number("init", 0);
    if (code)
        return code;
    for (int i = 0; i < MAX_DEVICES; i++) {
        devices[i].index = i;
        for (int j = 0; j < MAX_SLICES; j++)
            slices[i][j] = (struct device){j, &devices[i]};
    }
    initialised = 1;
    return SUCCESS;
}

int nvmlShutdown(void)
{
    initialised = 0;
    return SUCCESS;
}

const char *nvmlErrorString(int code)
{
    static char message[64];
    snprintf(message, sizeof message, "fake NVML error %d", code);
    return message;
}

int nvmlSystemGetDriverVersion(char *out, unsigned size)
{
    ENTER(NULL);
    return text(NULL, "driver", "570.124.06", out, size);
}

int nvmlSystemGetNVMLVersion(char *out, unsigned size)
{
    ENTER(NULL);
    return text(NULL, "nvml", "12.570.124.06", out, size);
}

int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    ENTER(NULL);
    *version = number("cuda", 12080);
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    ENTER(NULL);
    *count = number("count", 8);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **device)
{
    ENTER(NULL);
    if (index >= number("count", 8) || index >= MAX_DEVICES)
        return INVALID_ARGUMENT;
    *device = &devices[index];
    return enter(&devices[index], __func__);
}

/* ---- one GPU ---- */

NUMBER(nvmlDeviceGetMinorNumber, "minor", device->index)
NUMBER(nvmlDeviceGetPowerUsage, "power_mw", 100000)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, "power_limit_mw", 700000)
NUMBER(nvmlDeviceGetComputeMode, "compute_mode", 0)
NUMBER(nvmlDeviceGetPersistenceMode, "persistence", 1)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_gen", 5)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_max_gen", 5)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width", 16)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, "pcie_max_width", 16)
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, "pages_pending", 0)
NUMBER(nvmlDeviceGetMaxMigDeviceCount, "mig_slots", 7)

int nvmlDeviceGetName(struct device *device, char *out, unsigned size)
{
    ENTER(device);
    return text(device, "name", device->parent ? "NVIDIA H100 80GB HBM3 MIG 1g.10gb" : "NVIDIA H100 80GB HBM3", out,
                size);
}

int nvmlDeviceGetUUID(struct device *device, char *out, unsigned size)
{
    char fallback[64];
    ENTER(device);
    if (device->parent)
        snprintf(fallback, sizeof fallback, "MIG-00000000-0000-0000-%04d-%012d", device->parent->index, device->index);
    else
        snprintf(fallback, sizeof fallback, "GPU-00000000-0000-0000-0000-%012d", device->index);
    return text(device, "uuid", fallback, out, size);
}

struct pci_info {
    char legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

int nvmlDeviceGetPciInfo_v3(struct device *device, struct pci_info *info)
{
    ENTER(device);
    memset(info, 0, sizeof *info);
    info->bus = 0x10 + device->index;
    info->device_id = 0x233010de;
    snprintf(info->legacy, sizeof info->legacy, "0000:%02X:00.0", info->bus);
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", info->bus);
    return SUCCESS;
}

struct memory_v1 {
    uint64_t total, free, used;
};

struct memory_v2 {
    unsigned version;
    uint64_t total, reserved, free, used;
};

int nvmlDeviceGetMemoryInfo(struct device *device, struct memory_v1 *memory)
{
    ENTER(device);
    memory->total = device_number(device, "mem_total_mib", device->parent ? 9856 : 81559) << 20;
    memory->used = device_number(device, "mem_used_mib", 0) << 20;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(struct device *device, struct memory_v2 *memory)
{
    ENTER(device);
    if (memory->version != (sizeof *memory | 2u << 24))
        return VERSION_MISMATCH;
    memory->total = device_number(device, "mem_total_mib", device->parent ? 9856 : 81559) << 20;
    memory->reserved = 512ull << 20;
    memory->used = device_number(device, "mem_used_mib", 0) << 20;
    memory->free = memory->total - memory->used - memory->reserved;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(struct device *device, unsigned *rates)
{
    ENTER(device);
    rates[0] = device_number(device, "util", 0);
    rates[1] = device_number(device, "mem_util", 0);
    return SUCCESS;
}

int nvmlDeviceGetTemperature(struct device *device, unsigned sensor, unsigned *celsius)
{
    ENTER(device);
    (void)sensor;
    *celsius = device_number(device, "temp", 40);
    return SUCCESS;
}

int nvmlDeviceGetClockInfo(struct device *device, unsigned type, unsigned *mhz)
{
    ENTER(device);
    *mhz = device_number(device, type == 1 ? "clock" : "mem_clock", 1980);
    return SUCCESS;
}

int nvmlDeviceGetMaxClockInfo(struct device *device, unsigned type, unsigned *mhz)
{
    ENTER(device);
    *mhz = device_number(device, type == 1 ? "max_clock" : "max_mem_clock", 1980);
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(struct device *device, uint64_t *reasons)
{
    ENTER(device);
    *reasons = device_number(device, "clock_reasons", 0);
    return SUCCESS;
}

/* The name before driver 535. */
int nvmlDeviceGetCurrentClocksThrottleReasons(struct device *device, uint64_t *reasons)
{
    ENTER(device);
    *reasons = device_number(device, "clock_reasons", 0);
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(struct device *device, int *major, int *minor)
{
    ENTER(device);
    *major = device_number(device, "cc_major", 9);
    *minor = device_number(device, "cc_minor", 0);
    return SUCCESS;
}

int nvmlDeviceGetCpuAffinity(struct device *device, unsigned words, uint64_t *mask)
{
    ENTER(device);
    memset(mask, 0, words * sizeof *mask);
    mask[0] = device_number(device, "cpus", device->index < 4 ? 0x00ff : 0xff00);
    return SUCCESS;
}

int nvmlDeviceGetMemoryAffinity(struct device *device, unsigned words, uint64_t *mask, unsigned scope)
{
    ENTER(device);
    (void)scope;
    memset(mask, 0, words * sizeof *mask);
    mask[0] = 1ull << device_number(device, "numa", device->index < 4 ? 0 : 1);
    return SUCCESS;
}

/* ---- memory errors ---- */

int nvmlDeviceGetEccMode(struct device *device, unsigned *current, unsigned *pending)
{
    ENTER(device);
    *current = *pending = device_number(device, "ecc", 1);
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(struct device *device, unsigned type, unsigned counter, uint64_t *errors)
{
    char key[64];
    ENTER(device);
    snprintf(key, sizeof key, "ecc_%s_%s", counter ? "aggregate" : "volatile", type ? "uncorrected" : "corrected");
    *errors = device_number(device, key, 0);
    return SUCCESS;
}

struct sram_status {
    unsigned version;
    uint64_t aggregate_parity, aggregate_secded, aggregate_corrected;
    uint64_t volatile_parity, volatile_secded, volatile_corrected;
    uint64_t buckets[5];
    unsigned threshold_exceeded;
};

int nvmlDeviceGetSramEccErrorStatus(struct device *device, struct sram_status *status)
{
    ENTER(device);
    if (status->version != (sizeof *status | 1u << 24))
        return VERSION_MISMATCH;
    status->aggregate_parity = device_number(device, "sram_parity", 0);
    status->aggregate_secded = device_number(device, "sram_secded", 0);
    status->threshold_exceeded = device_number(device, "sram_threshold", 0);
    return SUCCESS;
}

int nvmlDeviceGetRemappedRows(struct device *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failed)
{
    ENTER(device);
    *corrected = device_number(device, "rows_corrected", 0);
    *uncorrected = device_number(device, "rows_uncorrected", 0);
    *pending = device_number(device, "rows_pending", 0);
    *failed = device_number(device, "rows_failed", 0);
    return SUCCESS;
}

struct field_value {
    unsigned id, scope;
    int64_t timestamp, latency;
    unsigned type;
    int result;
    union {
        unsigned whole;
        uint64_t wide;
    } value;
};

/* `field.ID` or, for fields of one link, `field.ID.SCOPE`; a field without a line is not supported. */
int nvmlDeviceGetFieldValues(struct device *device, int count, struct field_value *values)
{
    char key[64], value[LINE];
    ENTER(device);
    for (int i = 0; i < count; i++) {
        snprintf(key, sizeof key, "field.%u.%u", values[i].id, values[i].scope);
        int found = device_setting(device, key, value, sizeof value);
        snprintf(key, sizeof key, "field.%u", values[i].id);
        found = found || device_setting(device, key, value, sizeof value);
        values[i].result = found ? SUCCESS : NOT_SUPPORTED;
        values[i].type = 3; /* unsigned long long */
        values[i].value.wide = found ? strtoull(value, NULL, 0) : 0;
    }
    return SUCCESS;
}

/* ---- processes: `procs=pid:MiB,pid:-` with `-` for a size that the driver does not tell ---- */

struct process {
    unsigned pid;
    uint64_t memory;
    unsigned gpu_instance, compute_instance;
};

static int processes(const struct device *device, const char *key, unsigned *count, struct process *out)
{
    char list[LINE];
    unsigned capacity = *count, used = 0;

    if (!device_setting(device, key, list, sizeof list))
        list[0] = '\0';
    for (char *entry = strtok(list, ","); entry; entry = strtok(NULL, ",")) {
        char *size = strchr(entry, ':');
        if (out && used < capacity) {
            out[used].pid = strtoul(entry, NULL, 10);
            out[used].memory = size && size[1] != '-' ? strtoull(size + 1, NULL, 10) << 20 : UINT64_MAX;
            out[used].gpu_instance = out[used].compute_instance = UINT32_MAX;
        }
        used++;
    }
    *count = used;
    return used > capacity ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(struct device *device, unsigned *count, struct process *out)
{
    ENTER(device);
    return processes(device, "procs", count, out);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(struct device *device, unsigned *count, struct process *out)
{
    ENTER(device);
    return processes(device, "graphics_procs", count, out);
}

/* What drivers before 510 have, with the same structure. */
int nvmlDeviceGetComputeRunningProcesses_v2(struct device *device, unsigned *count, struct process *out)
{
    ENTER(device);
    return processes(device, "procs", count, out);
}

/* ---- MIG: `mig=1` and `mig_slices=N` ---- */

int nvmlDeviceGetMigMode(struct device *device, unsigned *current, unsigned *pending)
{
    ENTER(device);
    *current = *pending = device_number(device, "mig", 0);
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(struct device *device, unsigned index, struct device **slice)
{
    ENTER(device);
    if (index >= MAX_SLICES || index >= device_number(device, "mig_slices", 0))
        return NOT_FOUND;
    *slice = &slices[device->index][index];
    return SUCCESS;
}

/* ---- NVLink and fabric: `nvlinks=N`, `nvlink.L=0|1`, `nvlink_errors.L.COUNTER=N` ---- */

static int link_absent(const struct device *device, unsigned link)
{
    unsigned links = device_number(device, "nvlinks", 18);
    if (links == 0)
        return NOT_SUPPORTED;
    return link < links ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetNvLinkState(struct device *device, unsigned link, unsigned *active)
{
    char key[64];
    ENTER(device);
    snprintf(key, sizeof key, "nvlink.%u", link);
    *active = device_number(device, key, 1);
    return link_absent(device, link);
}

int nvmlDeviceGetNvLinkRemoteDeviceType(struct device *device, unsigned link, unsigned *type)
{
    ENTER(device);
    *type = device_number(device, "nvlink_remote", 2);
    return link_absent(device, link);
}

int nvmlDeviceGetNvLinkErrorCounter(struct device *device, unsigned link, unsigned counter, uint64_t *errors)
{
    char key[64];
    ENTER(device);
    snprintf(key, sizeof key, "nvlink_errors.%u.%u", link, counter);
    *errors = device_number(device, key, 0);
    return link_absent(device, link);
}

struct fabric_v1 {
    unsigned char cluster[16];
    unsigned status, clique, state;
};

struct fabric_versioned {
    unsigned version;
    unsigned char cluster[16];
    unsigned status, clique, state, health;
    unsigned char summary;
};

static void fabric_cluster(const struct device *device, unsigned char *cluster)
{
    memset(cluster, 0, 16);
    cluster[15] = device_number(device, "fabric_cluster", 0);
}

int nvmlDeviceGetGpuFabricInfo(struct device *device, struct fabric_v1 *fabric)
{
    ENTER(device);
    fabric_cluster(device, fabric->cluster);
    fabric->status = device_number(device, "fabric_status", 0);
    fabric->clique = device_number(device, "fabric_clique", 0);
    fabric->state = device_number(device, "fabric_state", 3);
    return SUCCESS;
}

int nvmlDeviceGetGpuFabricInfoV(struct device *device, struct fabric_versioned *fabric)
{
    ENTER(device);
    if (fabric->version >> 24 > number("fabric.interface", 2))
        return VERSION_MISMATCH;
    fabric_cluster(device, fabric->cluster);
    fabric->status = device_number(device, "fabric_status", 0);
    fabric->clique = device_number(device, "fabric_clique", 0);
    fabric->state = device_number(device, "fabric_state", 3);
    fabric->health = device_number(device, "fabric_health", 2);
    return SUCCESS;
}

/* ---- pairs ---- */

static uint64_t pair_number(const char *kind, const struct device *a, const struct device *b, int index,
                            uint64_t fallback)
{
    char key[64];
    int low = a->index < b->index ? a->index : b->index;
    int high = a->index < b->index ? b->index : a->index;

    if (index < 0)
        snprintf(key, sizeof key, "%s.%d-%d", kind, low, high);
    else
        snprintf(key, sizeof key, "%s.%d-%d.%d", kind, low, high, index);
    return number(key, fallback);
}

int nvmlDeviceGetTopologyCommonAncestor(struct device *a, struct device *b, unsigned *level)
{
    ENTER(a);
    ENTER(b);
    *level = pair_number("link", a, b, -1, number("link", 50));
    return SUCCESS;
}

/* `p2p.INDEX` is the answer for every pair that has no line of its own. */
int nvmlDeviceGetP2PStatus(struct device *a, struct device *b, unsigned index, unsigned *status)
{
    char key[32];
    ENTER(a);
    ENTER(b);
    snprintf(key, sizeof key, "p2p.%u", index);
    *status = pair_number("p2p", a, b, index, number(key, 0));
    return SUCCESS;
}
