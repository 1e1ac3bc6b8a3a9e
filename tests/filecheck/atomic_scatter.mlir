// RUN: %opt %s -p atomic-scatter | %filecheck %s

// What is loaded, added to and stored becomes one atomic addition, the new value on either side, and
// a minimum likewise;
// a store of something else stays, and so does a load that is used twice.

func.func @loop(%start: i64, %stop: i64, %y: memref<?xf64>, %z: memref<?xf64>) {
  %index = arith.index_cast %start : i64 to index
  %value = arith.constant 1.0 : f64
  %left = memref.load %y[%index] : memref<?xf64>
  %sum = arith.addf %left, %value : f64
  memref.store %sum, %y[%index] : memref<?xf64>
  %right = memref.load %y[%index] : memref<?xf64>
  %other = arith.addf %value, %right : f64
  memref.store %other, %y[%index] : memref<?xf64>
  memref.store %value, %z[%index] : memref<?xf64>
  %twice = memref.load %z[%index] : memref<?xf64>
  %double = arith.addf %twice, %twice : f64
  memref.store %double, %z[%index] : memref<?xf64>
  %last = memref.load %z[%index] : memref<?xf64>
  %smaller = arith.minnumf %last, %value : f64
  memref.store %smaller, %z[%index] : memref<?xf64>
  func.return
}

// CHECK:       %value = arith.constant 1.000000e+00 : f64
// CHECK-NEXT:  %{{.*}} = "memref.atomic_rmw"(%value, %y, %index) <{kind = 0 : i64}>
// CHECK-NEXT:  %{{.*}} = "memref.atomic_rmw"(%value, %y, %index) <{kind = 0 : i64}>
// CHECK-NEXT:  memref.store %value, %z[%index] : memref<?xf64>
// CHECK-NEXT:  %twice = memref.load %z[%index] : memref<?xf64>
// CHECK-NEXT:  %double = arith.addf %twice, %twice : f64
// CHECK-NEXT:  memref.store %double, %z[%index] : memref<?xf64>
// CHECK-NEXT:  %{{.*}} = "memref.atomic_rmw"(%value, %z, %index) <{kind = 9 : i64}>
// CHECK-NEXT:  func.return
